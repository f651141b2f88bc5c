"""Recipes in files: YAML or JSON of what `to_dict` writes."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.errors import RecipeError
from narrowgauge.recipes.serialize import from_dict, to_dict
from narrowgauge.recipes.spec import Recipe

SUFFIXES = (".yaml", ".yml", ".json")


def is_file_name(name: str) -> bool:
    """True where `name` can only be a recipe's file: it ends as one."""
    return name.endswith(SUFFIXES)


def read_recipe(path: str | Path) -> Recipe:
    """The recipe in a file. Raises RecipeError where there is none, or one that is no recipe."""
    import yaml  # on first use: `import narrowgauge` loads this module's neighbours

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise RecipeError(f"{path}: expected a file with a recipe, found: {reason}: give the path of one") from None
    try:
        return from_dict(values)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def recipe_text(recipe: Recipe, comment: str = "") -> str:
    """The recipe as YAML that `read_recipe` reads; comment: lines above it. Raises RecipeError as `to_dict` does."""
    import yaml

    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    return head + yaml.safe_dump(to_dict(recipe), sort_keys=False, width=120)

"""The report of a problem: versions, hardware, a run's recipe, configuration and last rows; without private data."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from narrowgauge.cli import capabilities
from narrowgauge.cli.privacy import QUOTE, Scrubber
from narrowgauge.errors import CheckpointError, ConfigError, RecipeError

STEPS, EVENTS = 10, 20  # how many of the last rows
WORST = "worst"
_ENDS = {"sqnr_db": min}  # of the other measures, the largest is the worst
_MEASURES = ("saturated", "flushed", "sqnr_db", "zero", "lost")


def bug_report(run: str | None = None) -> dict[str, Any]:
    """What helps to find a fault. run: the folder of a run, of `train` or a fine-tuning command.

    Raises ConfigError where there is no run.
    """
    scrub = Scrubber()
    facts = capabilities.everything()
    found: dict[str, Any] = {
        "machine": {name: _machine_fact(scrub, name, value) for name, value in facts["machine"].items()},
        "packages": {
            name: f"{each['found']} {_unless_ok(each['status'])}".strip() for name, each in facts["packages"].items()
        },
        **{key: facts[key] for key in ("products", "kernels", "collectives", "programs")},
    }
    return found if run is None else found | {"run": _of_run(Path(run))}


def _unless_ok(status: str) -> str:
    return "" if status in ("ok", "not installed") else f"({status})"


def _machine_fact(scrub: Scrubber, name: str, value: Any) -> Any:
    """Variables of the environment tell numbers and policies; other values, such as serial numbers, stay private."""
    if name in capabilities.VARIABLES and not _HARMLESS.fullmatch(value):
        return "set"
    return _fact(scrub, value)


_HARMLESS = re.compile(r"[\d,]{1,64}|active|passive", re.IGNORECASE)


def _fact(scrub: Scrubber, value: Any) -> Any:
    return scrub.fact(value) if isinstance(value, str) else value


def _of_run(folder: Path) -> dict[str, Any]:
    """Configuration and journal of a run; what cannot be read is said, and is no reason for an error."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder}: expected a run folder, found no config.yaml in it: give the folder of a run")
    found: dict[str, Any] = {}
    try:
        found["config"] = _config(folder)
    except ConfigError:
        found["config"] = "cannot be read"
    try:
        found["journal"] = _journal(folder)
    except (ConfigError, CheckpointError) as error:
        found["journal"] = Scrubber().message(str(error))
    return found


def _config(folder: Path) -> dict[str, Any]:
    """What differs from the defaults: numbers and flags, and texts that are names of this package's own."""
    from narrowgauge.integrations.finetune_run import FinetuneRun
    from narrowgauge.train.run_folder import RunFolder

    config: Any = FinetuneRun(folder).settings() if FinetuneRun.is_at(folder) else RunFolder(folder).read_config()
    usual = dict(_leaves(_defaults(config)))
    known = _known_texts() | {text for each in dataclasses.fields(config) for text in each.metadata.get("choices", ())}
    changed = {
        key: value for key, value in _leaves(dataclasses.asdict(config)) if key not in usual or usual[key] != value
    }
    return {key: QUOTE if isinstance(value, str) and value not in known else value for key, value in changed.items()}


def _defaults(config: Any) -> dict[str, Any]:
    """Of the fields that have a default."""
    found: dict[str, Any] = {}
    for each in dataclasses.fields(config):
        if each.default is not dataclasses.MISSING:
            found[each.name] = each.default
        elif each.default_factory is not dataclasses.MISSING:
            value = each.default_factory()
            found[each.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
    return found


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("optimizer.lr", 1e-3) and so on; of lists, and mappings whose keys may be anything, how many entries."""
    for key, value in values.items():
        if isinstance(value, dict) and key not in _FREE:
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, dict | list | tuple):
            yield f"{prefix}{key}", len(value)
        else:
            yield f"{prefix}{key}", value


_FREE = ("recipe_fields",)  # the recipe itself is in the journal


def _known_texts() -> set[str]:
    from narrowgauge.distributed.pipeline_schedule import SCHEDULES
    from narrowgauge.integrations.finetune_config import TASKS
    from narrowgauge.models.config import Activation, Norm, Positions
    from narrowgauge.models.presets import preset_names
    from narrowgauge.numerics import formats
    from narrowgauge.recipes.library import recipe_names
    from narrowgauge.train.sections import MODES

    parts = {*Activation, *Norm, *Positions}
    ours = {*recipe_names(), *preset_names(), *formats.ALL, *TASKS, *MODES, *SCHEDULES, *map(str, parts)}
    return ours | {"cpu", "cuda", "auto", "bytes"}


def _journal(folder: Path) -> dict[str, Any]:
    """The header's facts, the last steps, evaluations and events, and the worst of the last sampled step."""
    from narrowgauge.observe import Journal

    journal = Journal(folder)
    last = {kind: deque[Any](maxlen=most) for kind, most in _KEPT.items()}
    for row in journal.of_kind(*_KEPT):
        last[row["kind"]].append(row)
    layers = {name for row in last["precision"] for name in row.get("layers", {})}
    layers |= {str(row["name"]) for row in _list(journal.header.get("conversion")) if "name" in row}
    scrub = Scrubber({*layers, *_known_texts()})
    header = {key: journal.header.get(key) for key in ("schema", "versions", "device", "threads", "parameters")}
    found: dict[str, Any] = {
        "header": {key: _facts(scrub, value) for key, value in header.items() if value is not None},
        "environment": _facts(scrub, journal.header.get("environment", {})),
        "recipe": [scrub.message(line) for line in _changed(journal.header.get("recipe"))],
        "layers": _counted(scrub, _list(journal.header.get("conversion"))),
        "problems": [scrub.message(problem) for problem in journal.problems],
        **{kind: [scrub.values(row) for row in rows] for kind, rows in last.items() if kind != "precision" and rows},
    }
    if last["precision"]:
        found[WORST] = scrub.values(worst(last["precision"][-1]))
    return {key: value for key, value in found.items() if value}


_KEPT = {"step": STEPS, "evaluation": 3, "recipe": EVENTS, "warning": EVENTS, "resumed": EVENTS, "guard": EVENTS,
         "bytes": 1, "precision": 1}  # fmt: skip


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _facts(scrub: Scrubber, value: Any) -> Any:
    if isinstance(value, dict):
        return {scrub.message(str(key)): _facts(scrub, each) for key, each in value.items()}
    return _fact(scrub, value)


def _changed(recipe: Any) -> list[str]:
    """The lines of its table that are not as usual."""
    from narrowgauge.recipes.serialize import from_dict
    from narrowgauge.recipes.spec import Recipe

    try:
        lines = str(from_dict(recipe)).splitlines()
    except (RecipeError, AttributeError, TypeError, KeyError):
        return ["cannot be read by this version"]
    usual = set(str(Recipe()).splitlines())
    return [" ".join(line.split()) for line in lines if line not in usual]


def _counted(scrub: Scrubber, conversion: list[Mapping[str, Any]]) -> dict[str, int]:
    """{what happened to layers, and why: how many of them}."""
    counts: dict[str, int] = {}
    for row in conversion:
        key = scrub.message(": ".join(str(row[part]) for part in ("status", "reason") if row.get(part)))
        counts[key] = counts.get(key, 0) + 1
    return counts


def worst(precision: Mapping[str, Any]) -> dict[str, Any]:
    """Of a row of kind "precision": {"step": n, "role measure": "value in layer"}, the worst layer of each."""
    found: dict[str, tuple[float, str]] = {}
    for layer, roles in precision.get("layers", {}).items():
        for role, measures in roles.items():
            for measure in _MEASURES:
                value = measures.get(measure)
                if not isinstance(value, int | float) or value != value:
                    continue
                key = f"{role} {measure}"
                found[key] = _ENDS.get(measure, max)(
                    found.get(key, (value, layer)), (value, layer), key=lambda at: at[0]
                )
    return {"step": precision["step"]} | {key: f"{value:.4g} in {layer}" for key, (value, layer) in found.items()}


def markdown(report: Mapping[str, Any]) -> str:
    """The report as Markdown: what people read first, and the rest folded away."""
    lines = ["### What happened", "", "(what you did, what you expected, what you saw)", "", "### Machine", ""]
    lines += [f"- {name}: {value}" for name, value in report["machine"].items()]
    lines += ["", "### Packages", "", ", ".join(f"{name} {found}" for name, found in report["packages"].items())]
    if "run" in report:
        lines += ["", "### Run", "", *_block(report["run"])]
    rest = {key: [_row(row) for row in report[key]] for key in ("products", "kernels", "collectives", "programs")}
    lines += ["", "<details><summary>What this machine can do</summary>", "", *_block(rest), "", "</details>"]
    return "\n".join(lines)


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: ", ".join(value) if isinstance(value, list) else value for key, value in row.items() if value != ""}


def _block(value: Any) -> list[str]:
    """YAML reads better than JSON, and holds the same."""
    import yaml

    text = yaml.safe_dump(json.loads(json.dumps(value)), sort_keys=False, allow_unicode=True, width=110)
    return ["```yaml", text.rstrip(), "```"]

"""What a layer may run in, which layers there are to choose for, and the recipe that a choice for each of them is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from narrowgauge.errors import ConfigError, RecipeError
from narrowgauge.layers.recipe_layer import RecipeLayer
from narrowgauge.numerics.formats import FP32
from narrowgauge.observe.plan_state import layers_of
from narrowgauge.recipes import library
from narrowgauge.recipes.files import is_file_name
from narrowgauge.recipes.layers import PRODUCT_FIELDS, products_of
from narrowgauge.recipes.select import Candidate, select
from narrowgauge.recipes.spec import GEMMS, OPERANDS, Recipe

DEFAULT_CHOICES = ("fp8_current", "mxfp8", "nvfp4")
WIDE_BITS, FLOAT_BITS = 16, 32
Assignment = Mapping[str, str]  # {layer: the name of its choice}


@dataclass(frozen=True)
class Choice:
    """One way for a layer to multiply.

    name: the named recipe's whose casts they are, or the compute dtype's. recipe: the base recipe with those casts in
    every layer. is_wide: whether that is the compute dtype, in which every layer is right.
    """

    name: str
    recipe: Recipe
    is_wide: bool = False

    def bits(self, gemm: str) -> int:
        """Of the wider operand of a product: what decides a tensor core's rate; float32 counts as TF32, 32 bits."""
        compute = FLOAT_BITS if self.recipe.compute is FP32 else WIDE_BITS
        specs = [self.recipe.operand(gemm, role) for role in OPERANDS[gemm]]
        return max(compute if spec is None else min(spec.format.bits, compute) for spec in specs)

    @property
    def relative_time(self) -> float:
        """Of the three products, of the same shapes, as a share of those in 16 bits, at tensor cores' peak rates.

        FP8 and FP6 run at twice the rate of 16 bits, FP4 at four times, TF32 at half (NVIDIA Blackwell, dense).
        """
        shares = {4: 0.25, 6: 0.5, 8: 0.5, FLOAT_BITS: 2.0}
        return sum(shares.get(self.bits(gemm), 1.0) for gemm in GEMMS) / len(GEMMS)


def wide(base: Recipe) -> Recipe:
    """The base recipe with every product in the compute dtype: all that is stored and sent stays."""
    plain = Recipe()
    return base.replace(
        name="wide", first_last=(0, 0), smooth=(), schedule=(), layers=(),
        **{field: getattr(plain, field) for field in PRODUCT_FIELDS},
    )  # fmt: skip


def choices_of(base: Recipe, names: Sequence[str]) -> list[Choice]:
    """The compute dtype, and the casts of each recipe, by name or by file, within a resolved base recipe.

    Raises RecipeError for an unknown name, for a recipe that casts no operand, and for one whose scales are delayed;
    ConfigError where there is none to choose, or one twice.
    """
    if not names:
        raise ConfigError(
            f"choices: expected names of recipes that cast, e.g. {', '.join(DEFAULT_CHOICES)}, found none"
        )
    plain = wide(base)
    found = [Choice(plain.compute_format.name.lower(), plain, is_wide=True)]
    for name in names:
        source = library.recipe(name)
        if not source.quantizes_gemms:
            raise RecipeError(
                f"choice '{name}': it casts no operand of a product, and {found[0].name} is a choice anyway: leave it "
                "out"
            )
        casts = products_of(source)
        name = source.name if is_file_name(name) else name
        if any(getattr(spec, "is_delayed", False) for spec in casts.values()):
            raise RecipeError(
                f"choice '{name}': its scales follow from steps before, and single batches are measured here: expected "
                "current scaling; use fp8_current"
            )
        if any(choice.name == name for choice in found):
            raise ConfigError(
                f"choices={', '.join(names)}: expected each name once, found '{name}' twice: leave one out"
            )
        found.append(Choice(name, plain.replace(name=name, **casts)))
    return found


def tunable(model: nn.Module, choice: Choice) -> list[str]:
    """Names of the layers that the recipe of a narrow choice would cast, in the model's order.

    Raises ConfigError where there is none, with the reason of the first layer.
    """
    candidates = [Candidate(each.name, each.in_features, each.out_features) for each in layers_of(model)]
    selections = select(candidates, choice.recipe)
    names = [each.name for each in selections if each.quantized]
    if not names:
        why = f"'{selections[0].name}' is kept ({selections[0].reason})" if selections else "it has no linear layer"
        raise ConfigError(f"expected a model with layers to choose for, found none: {why}")
    return names


def recipe_of(base: Recipe, assignment: Assignment, choices: Mapping[str, Choice], name: str) -> Recipe:
    """The base recipe in which each layer multiplies as its choice says, and all others in the compute dtype."""
    found = wide(base).replace(name=name)
    for choice in choices.values():
        layers = [layer for layer, chosen in assignment.items() if chosen == choice.name]
        if layers and not choice.is_wide:
            found = found.for_layers(layers, choice.recipe)
    return found


def put(model: nn.Module, assignment: Assignment, choices: Mapping[str, Choice]) -> None:
    """Let layers of a converted model multiply as by `recipe_of`, quickly; those not named stay as they are."""
    for name, chosen in assignment.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, RecipeLayer)
        choice = choices[chosen]
        layer.configure(choice.recipe, not choice.is_wide, f"tuned: {chosen}")


def ends(layers: Sequence[str]) -> tuple[list[str], list[str]]:
    """(first and last layer; layers of the first and the last block): what hand rules keep wide.

    A block is what the first number in a layer's name counts; where no name has one, a layer is a block.
    """
    blocks = [next((int(part) for part in name.split(".") if part.isdigit()), None) for name in layers]
    known = [block for block in blocks if block is not None]
    pair = [layers[0], layers[-1]]
    if not known:
        return pair, pair
    return pair, [name for name, block in zip(layers, blocks, strict=True) if block in (min(known), max(known))]

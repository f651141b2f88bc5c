"""Bytes of training state by closed formulas: parameters, masters, gradients, moments and scales, before there are any.

Each formula is that of the code which stores the thing: `optim.storage`, `layers.parameters`, `layers.gradient_hooks`.
Nothing is allocated; what is planned of a model are shapes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from narrowgauge.layers.delayed import rules_of
from narrowgauge.layers.gradient_hooks import is_cast
from narrowgauge.layers.kinds import Kind, kind_of
from narrowgauge.layers.parameters import quantized_by
from narrowgauge.numerics.formats import BF16, FP32
from narrowgauge.numerics.packing import packed_width
from narrowgauge.numerics.scaling import ULP
from narrowgauge.ops.casts import LinearCasts
from narrowgauge.ops.matmul import GRAD_INPUT
from narrowgauge.optim.formats import StateFormats
from narrowgauge.optim.replace import needs_own
from narrowgauge.optim.storage import matrix_shape
from narrowgauge.recipes.select import Candidate, select
from narrowgauge.recipes.spec import CastSpec, Recipe
from narrowgauge.tensors import tiles
from narrowgauge.tensors.parts import scale_dtype

FLOAT = 4  # bytes of a float32
STEP = 4  # torch's optimizers count the steps of each parameter in a float32 tensor
AMAX = 4  # a QuantizedTensor keeps its source's amax


@dataclass(frozen=True)
class Shape:
    """A parameter as it is planned.

    name: in the model. whole: its shape. held: of this rank's part, e.g. after `parted`. is_scaled: whether a recipe
    that stores weights in a scaled format stores it so. is_table: an embedding's. trains: whether it has a gradient.
    itemsize: bytes of a value as the model was built, which frozen ones keep.
    """

    name: str
    whole: tuple[int, ...]
    held: tuple[int, ...]
    is_scaled: bool = False
    is_table: bool = False
    trains: bool = True
    itemsize: int = FLOAT

    @property
    def numel(self) -> int:
        """Values of all parts: what thresholds go by."""
        return math.prod(self.whole)

    @property
    def held_numel(self) -> int:
        """Values on this rank."""
        return math.prod(self.held)

    def sharded(self, ranks: int) -> Shape:
        """Its rows over so many ranks of FSDP2: the part of the first, which has the most."""
        rows, *others = self.held or (1,)
        return replace(self, held=(-(-rows // ranks), *others))


def bytes_of(spec: CastSpec, shape: Sequence[int]) -> int:
    """Bytes of a tensor of `shape` as `spec` stores it: codes, scales of tiles with their padding, and the amax."""
    numel = math.prod(shape)
    if not spec.is_scaled or spec.scale is ULP:
        return numel * spec.format.dtype.itemsize
    codes = numel * spec.format.dtype.itemsize
    if spec.format.bits < 8:
        columns = shape[-1] if shape else 1
        codes = numel // max(columns, 1) * packed_width(columns, spec.format.bits)
    scales = math.prod(tiles.scale_shape(shape, spec)) if spec.in_blocks else 1
    return codes + scales * scale_dtype(spec).itemsize + AMAX


def moment_bytes(spec: CastSpec, shape: Sequence[int]) -> int:
    """Bytes of a moment of a parameter of `shape`: with tiles it is kept as a matrix."""
    kept = matrix_shape(torch.Size(shape)) if spec.in_blocks else shape
    return bytes_of(spec, kept)


def shapes_of(model: nn.Module) -> list[Shape]:
    """The parameters of a model, each once; it may be on the meta device."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    scaled = {id(p) for p in quantized_by(model, Recipe())}
    return [
        Shape(name, tuple(p.shape), tuple(p.shape), id(p) in scaled, id(p) in tables, p.requires_grad, p.itemsize)
        for name, p in model.named_parameters()
    ]


def state_of(shape: Shape, recipe: Recipe, *, wide_grad: bool = False) -> dict[str, int]:
    """Bytes by role that a resolved recipe keeps of one parameter on this rank.

    wide_grad: gradients are summed over micro-batches, in float32 (`narrowgauge.accumulate`).
    """
    held, numel = shape.held, shape.held_numel
    if not shape.trains:
        return {"param": numel * shape.itemsize}
    is_scaled = recipe.param.is_scaled and shape.is_scaled and (recipe.embeddings or not shape.is_table)
    in_bf16 = recipe.param.format is BF16
    found = {"param": bytes_of(recipe.param, held) if is_scaled else numel * (BF16 if in_bf16 else FP32).dtype.itemsize}
    if not needs_own(recipe):
        return found | {"grad": numel * FLOAT, "exp_avg": numel * FLOAT, "exp_avg_sq": numel * FLOAT, "step": STEP}
    formats = StateFormats.of(recipe)
    if formats.master is not None and (in_bf16 if formats.master.scale is ULP else in_bf16 or is_scaled):
        found["master"] = bytes_of(formats.master, held)
    found["grad"] = grad_bytes(shape, recipe, wide_grad=wide_grad)
    for role in ("exp_avg", "exp_avg_sq"):
        found[role] = moment_bytes(formats.of_moment(role, shape.numel), held)
    return found


def grad_bytes(shape: Shape, recipe: Recipe, *, wide_grad: bool = False) -> int:
    """Bytes of the gradient of one parameter, once backward is over."""
    if wide_grad:
        return shape.held_numel * FLOAT
    if not is_cast(recipe.grad):
        return shape.held_numel * recipe.grad.format.dtype.itemsize
    stays = shape.numel < recipe.min_state_size or (shape.is_table and not recipe.embeddings)
    return shape.held_numel * FLOAT if stays else bytes_of(recipe.grad, shape.held)


def total(counts: Mapping[Shape, int], recipe: Recipe, *, wide_grad: bool = False) -> dict[str, int]:
    """Bytes by role of so many parameters of each shape."""
    found: Counter[str] = Counter()
    for shape, count in counts.items():
        for role, size in state_of(shape, recipe, wide_grad=wide_grad).items():
            found[role] += count * size
    return dict(found)


@dataclass(frozen=True)
class Layer:
    """A linear layer that a recipe chooses from. experts: of which it has a weight and a state each."""

    name: str
    in_features: int
    out_features: int
    experts: int = 1


def layers_of(model: nn.Module) -> list[Layer]:
    """The linear layers of a model, in order."""
    return [
        Layer(name, int(m.in_features), int(m.out_features), int(getattr(m, "experts", 1)))  # type: ignore[arg-type]
        for name, m in model.named_modules()
        if kind_of(m) is Kind.LINEAR and hasattr(m, "in_features")
    ]


def quantized(layers: Sequence[Layer], recipe: Recipe) -> dict[str, bool]:
    """By name, whether a recipe quantizes the layer."""
    found = select([Candidate(each.name, each.in_features, each.out_features) for each in layers], recipe)
    return {each.name: each.quantized for each in found}


def scaling_bytes(recipe: Recipe) -> int:
    """Bytes of delayed scaling's buffers in one quantized layer, or for one of its experts."""
    rules = rules_of(LinearCasts.of(recipe, True))
    if not rules:
        return 0
    return sum(FLOAT * (rule.scale.history_length + 1) for rule in rules.values()) + 8 + 1  # rolls, pending


def weight_codes(layer: Layer, recipe: Recipe) -> int:
    """Bytes of codes and scales of a quantized layer's weight that wait for grad_input.

    0 where the weight itself is kept by reference, and cast again, since it is wide.
    """
    spec = LinearCasts.of(recipe, True).spec(GRAD_INPUT, "weight")
    if not spec.format.is_narrow:
        return 0
    numel = layer.in_features * layer.out_features
    codes = numel * spec.format.bits // 8 if spec.format.bits < 8 else numel
    scales = math.prod(tiles.scale_shape((layer.out_features, layer.in_features), spec)) if spec.in_blocks else 1
    return layer.experts * (codes + scales * scale_dtype(spec).itemsize)


def is_multiplied_as_stored(recipe: Recipe) -> bool:
    """True where the codes of a weight's operand are those of the parameter itself (FP8-LM's O3)."""
    return LinearCasts.of(recipe, True).spec(GRAD_INPUT, "weight") == recipe.param and recipe.param.is_scaled

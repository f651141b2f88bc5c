"""Bytes that one rank sends in a step, and those that wait for it, by formulas of what the distributed code does.

Counts are those of `distributed.wire`: ideal algorithms, bytes that leave this rank, by the recipe's communication
roles. What is neither a gradient, a parameter nor an activation (amax values, norms) is left out: some bytes a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from narrowgauge.distributed import codec
from narrowgauge.distributed.buckets import bucket_values
from narrowgauge.layers.gradient_hooks import is_cast
from narrowgauge.layers.recipe_layer import evaluation_casts
from narrowgauge.numerics.formats import BF16, FP32
from narrowgauge.numerics.scaling import ScaleRule
from narrowgauge.observe.plan_layout import Outline, Spread
from narrowgauge.observe.plan_state import FLOAT, Shape
from narrowgauge.ops.casts import LinearCasts, OperandCast
from narrowgauge.ops.matmul import GRAD_INPUT, GRAD_WEIGHT, OUTPUT
from narrowgauge.recipes.spec import CastSpec, Recipe
from narrowgauge.tensors import tiles
from narrowgauge.tensors.parts import scale_dtype

WIDE = CastSpec(FP32)
BUCKETS = 3  # that are in memory at once, see `distributed.gradients`
BUFFERS = 2  # of a bucket: what is sent and what arrives
PREFETCHED = 2  # blocks whose parameters are gathered at once: the one that runs, and the next


class Unit(NamedTuple):
    """What FSDP2 gathers and reduces at once: this rank's tensor-parallel part of a block, or of all else.

    operands: names of weights that travel as the operands of the products they belong to.
    """

    shapes: Sequence[Shape]
    operands: frozenset[str]


def operand_cast(recipe: Recipe) -> CastSpec | None:
    """The cast in which weights of quantized layers are gathered; None: they travel as other parameters do.

    By the rules of `distributed.gathering.operand_spec`, for all quantized layers alike.
    """
    if not codec.spec_of(recipe, "param_comm").in_blocks:
        return None
    both = (LinearCasts.of(recipe, True), evaluation_casts(recipe, True))
    specs = {casts.spec(gemm, "weight") for casts in both for gemm in (OUTPUT, GRAD_INPUT)}
    if len(specs) != 1:
        return None
    (spec,) = specs
    follows = isinstance(spec.scale, ScaleRule) and spec.is_scaled and not spec.in_blocks and not spec.is_stochastic
    return spec if spec.format.is_narrow and spec.format.bits == 8 and follows else None


def gathered_bytes(unit: Unit, recipe: Recipe) -> int:
    """Bytes of the parameters of a unit, once they are gathered."""
    in_blocks = codec.spec_of(recipe, "param_comm").in_blocks
    kept = _kept_bytes(recipe)
    found = 0
    for p in unit.shapes:
        if p.name in unit.operands:
            found += p.held_numel
        elif not in_blocks and p.numel >= recipe.min_state_size:
            sent = codec.spec_of(recipe, "param_comm").format.dtype.itemsize
            found += p.held_numel * (sent if sent == kept else sent + kept)
        else:
            found += p.held_numel * kept
    return found


def _kept_bytes(recipe: Recipe) -> int:
    """Of a value of a parameter as layers see it."""
    return BF16.dtype.itemsize if recipe.param.format is BF16 else FLOAT


def param_comm(unit: Unit, recipe: Recipe, ranks: int) -> int:
    """Bytes sent to gather a unit once."""
    spec = codec.spec_of(recipe, "param_comm")
    sent = 0
    for p in unit.shapes:
        numel = p.sharded(ranks).held_numel
        if p.name in unit.operands:
            sent += numel
        elif p.numel < recipe.min_state_size:
            sent += numel * _kept_bytes(recipe)
        else:
            sent += codec.wire_bytes(numel, spec)
    return sent * (ranks - 1)


def scattered(unit: Unit, recipe: Recipe, spread: Spread) -> int:
    """Bytes sent to reduce the gradients of a unit over shards, and what is left over replicas, once."""
    by_spec: Counter[CastSpec] = Counter()
    for p in unit.shapes:
        if p.trains:
            spec = codec.spec_of(recipe, "grad_comm") if p.numel >= recipe.min_state_size else WIDE
            by_spec[spec] += _filled(p.sharded(spread.shard).held_numel, codec.block_of(spec))
    sent = sum(codec.wire_bytes(width, spec) for spec, width in by_spec.items()) * (spread.shard - 1)
    return sent + sum(_all_reduced(width, spec, spread.data) for spec, width in by_spec.items())


def averaged(shapes: Iterable[Shape], recipe: Recipe, ranks: int) -> int:
    """Bytes sent to average the gradients of replicas, once a step."""
    total = Counter[CastSpec]()
    for p in shapes:
        if p.trains:
            spec = _travels_as(p, recipe)
            total[spec] += _filled(p.held_numel, codec.block_of(spec))
    return sum(2 * codec.wire_bytes(width, spec) * (ranks - 1) // ranks for spec, width in total.items())


def _travels_as(p: Shape, recipe: Recipe) -> CastSpec:
    """As `distributed.gradients.GradientReducer.travels_as`."""
    stays = p.numel < recipe.min_state_size or (is_cast(recipe.grad) and p.is_table and not recipe.embeddings)
    if not stays:
        return codec.spec_of(recipe, "grad_comm")
    return CastSpec(BF16) if not is_cast(recipe.grad) and recipe.grad.format is BF16 else WIDE


def under_way(shapes: Sequence[Shape], units: Sequence[Unit], recipe: Recipe, spread: Spread) -> int:
    """Bytes of gradients on their way from backward to where they are kept: wide ones, and what travels of them."""
    spec = codec.spec_of(recipe, "grad_comm")
    if spread.shard > 1:
        # wide, flat side by side, and as bytes that are sent and that arrive
        sizes = [sum(p.held_numel for p in unit.shapes) for unit in units]
        return max(2 * FLOAT * size + BUFFERS * codec.wire_bytes(size, spec) for size in sizes)
    found = max((p.held_numel * FLOAT for p in shapes), default=0) if is_cast(recipe.grad) else 0
    if spread.data > 1:
        values = bucket_values(sum(p.held_numel for p in shapes))
        found += BUCKETS * BUFFERS * codec.wire_bytes(values, spec)
    return found


def partial_sums(shapes: Iterable[Shape], recipe: Recipe, ranks: int) -> int:
    """Bytes sent to sum the gradients of what all tensor-parallel ranks have whole, once a micro-batch."""
    large, small = codec.spec_of(recipe, "grad_comm"), 0
    values = 0
    for p in shapes:
        if p.trains and p.held == p.whole:
            small += p.numel if p.numel < recipe.min_state_size else 0
            values += p.numel if p.numel >= recipe.min_state_size else 0
    return _all_reduced(small, WIDE, ranks) + _all_reduced(values, large, ranks)


class Traffic(NamedTuple):
    """Bytes of activations that a part of a model sends for one micro-batch, forward and backward."""

    forward: int = 0
    backward: int = 0


class Exchanged:
    """What tensor-parallel ranks exchange of one micro-batch of `rows` tokens, by sequence parallelism."""

    def __init__(self, recipe: Recipe, ranks: int, rows: int) -> None:
        self.recipe, self.ranks, self.rows = recipe, ranks, rows // ranks
        self.spec = codec.spec_of(recipe, "activation_comm")
        self.is_plain = recipe.compute is FP32 and not recipe.tf32  # kept layers are torch's own

    def values(self, features: int) -> int:
        """Rows of one rank to or from all others, in the recipe's cast."""
        return codec.wire_bytes(self.rows * features, self.spec) * (self.ranks - 1)

    def codes(self, cast: OperandCast, features: int) -> int:
        """Rows of an operand, as the codes that are multiplied, or else as values."""
        spec = cast.spec
        if not spec.format.is_narrow:
            return self.values(features)
        packed = self.rows * (-(-features * spec.format.bits // 8) if spec.format.bits < 8 else features)
        scales = FLOAT
        if spec.in_blocks:
            scales = _numel(tiles.scale_shape((self.rows, features), spec)) * scale_dtype(spec).itemsize
        return (packed + scales) * (self.ranks - 1)

    def column(self, features: int, quantized: bool) -> Traffic:
        """A layer that gathers inputs of so many features, and sums their gradients."""
        if not quantized and self.is_plain:
            return Traffic(self.values(features), self.values(features))
        casts = LinearCasts.of(self.recipe, quantized)
        again = self.codes(casts.operand(GRAD_WEIGHT, "input"), features)
        return Traffic(self.codes(casts.operand(OUTPUT, "input"), features), again + self.values(features))

    def row(self, features: int, quantized: bool) -> Traffic:
        """A layer that sums outputs of so many features, and gathers their gradients."""
        if not quantized and self.is_plain:
            return Traffic(self.values(features), self.values(features))
        casts = LinearCasts.of(self.recipe, quantized)
        both = [casts.operand(gemm, "grad_output") for gemm in (GRAD_INPUT, GRAD_WEIGHT)]
        kinds = both[:1] if both[0].agrees_with(both[1]) else both
        return Traffic(self.values(features), sum(self.codes(each, features) for each in kinds))

    def table(self, features: int) -> Traffic:
        """An embedding whose rows are parted."""
        return Traffic(self.values(features), self.values(features))


def boundary(outline: Outline, recipe: Recipe, tensor: int, rows: int, itemsize: int) -> int:
    """Bytes of what one micro-batch sends from a stage to the next, and of its gradient back."""
    spec, numel = codec.spec_of(recipe, "pipeline_comm"), rows // tensor * outline.config.width
    return _filled(codec.wire_bytes(numel, spec), FLOAT) if spec.in_blocks else numel * spec.format.dtype.itemsize


def tied(p: Shape, recipe: Recipe) -> int:
    """Bytes sent to sum both gradients of a table that is on two stages, once a step."""
    return _all_reduced(p.held_numel, codec.spec_of(recipe, "grad_comm"), 2)


def _all_reduced(numel: int, spec: CastSpec, ranks: int) -> int:
    if ranks == 1 or not numel:
        return 0
    return 2 * (ranks - 1) * codec.wire_bytes(_filled(numel, ranks * codec.block_of(spec)) // ranks, spec)


def _filled(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _numel(shape: Sequence[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found

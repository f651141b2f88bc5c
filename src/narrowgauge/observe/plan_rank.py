"""One rank of a layout: the bytes that its stage holds by role, and those that it sends in a step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from narrowgauge.layers.gradient_hooks import is_cast
from narrowgauge.models.config import GPTConfig
from narrowgauge.numerics.formats import FP32
from narrowgauge.observe import plan_wire
from narrowgauge.observe.plan_activations import Saved
from narrowgauge.observe.plan_layers import Casts, LayerCast, casts_of
from narrowgauge.observe.plan_layout import BLOCK, Outline, Spread, blocks_of_stages, counted, outline
from narrowgauge.observe.plan_state import (
    FLOAT,
    Shape,
    grad_bytes,
    is_multiplied_as_stored,
    scaling_bytes,
    total,
    weight_codes,
)
from narrowgauge.observe.plan_wire import Exchanged, Traffic, Unit
from narrowgauge.recipes.spec import Recipe


class Step(NamedTuple):
    """A step of one rank: sequences of a micro-batch, their tokens, micro-batches, whether blocks are recomputed."""

    batch: int
    tokens: int
    accumulation: int
    recomputes: bool

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch."""
        return self.batch * self.tokens


@dataclass(frozen=True)
class Rank:
    """bytes: by role. grads_before: gradients that are there when a backward begins. wire: sent, by role."""

    bytes: dict[str, int]
    grads_before: int
    wire: dict[str, int]


@dataclass(frozen=True)
class Part:
    """What a stage has of a model. index: of the stage. numbers: of its blocks. ends: parameters beside them."""

    whole: Outline
    index: int
    stages: int
    numbers: range
    ends: Sequence[Shape]

    @property
    def blocks(self) -> int:
        """How many blocks it has."""
        return len(self.numbers)

    @property
    def is_first(self) -> bool:
        """True where the embedding is."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True where the head is."""
        return self.index == self.stages - 1


def of_stage(config: GPTConfig, recipe: Recipe, spread: Spread, step: Step, activations: Saved, index: int) -> Rank:
    """A rank of one stage of a GPT, the first of its tensor-parallel group and of its shards."""
    part = parts(config, spread)[index]
    casts = casts_of(config, recipe)
    found = _state(part, recipe, casts, spread, wide_grad=step.accumulation > 1 or spread.pipeline > 1)
    grads_before = found["grad"] if step.accumulation > 1 or spread.pipeline > 1 else 0
    found["activation"] = _activation(part, recipe, casts, spread, step, activations)
    found["logits"] = _logits(part, recipe, spread, step) if part.is_last else 0
    units = _units(part, casts)
    if spread.shard > 1:
        found["gathered"] = _gathered(part, recipe, casts, spread, units)
    found |= reduced([*part.whole.block, *part.ends], [*units.blocks, units.ends], recipe, spread, part.blocks)
    return Rank(found, grads_before, _sent(part, recipe, casts, spread, step, units, activations.stream.itemsize))


def parts(config: GPTConfig, spread: Spread) -> list[Part]:
    """Of all stages. Raises ConfigError where the model does not divide so."""
    whole = outline(config, spread.tensor)
    stages = blocks_of_stages(config, spread.pipeline)
    begins = itertools.accumulate(stages, initial=0)
    return [
        Part(whole, at, len(stages), range(begin, begin + blocks), _ends(whole, at, len(stages)))
        for at, (begin, blocks) in enumerate(zip(begins, stages, strict=False))
    ]


def parameters(config: GPTConfig) -> int:
    """Of the whole model."""
    return outline(config).parameters


def reduced(
    shapes: Sequence[Shape], units: Sequence[Unit], recipe: Recipe, spread: Spread, blocks: int = 1
) -> dict[str, int]:
    """The role of gradients on their way; shapes: of one block and of the ends."""
    several = [p for p in shapes if p.name.startswith(BLOCK)] * (blocks - 1)
    return {"reduced": plan_wire.under_way([*shapes, *several], units, recipe, spread)}


def averaged(shapes: Sequence[Shape], recipe: Recipe, ranks: int) -> dict[str, int]:
    """What replicas send in a step."""
    return {"grad_comm": plan_wire.averaged(shapes, recipe, ranks)} if ranks > 1 else {}


def _ends(whole: Outline, index: int, stages: int) -> list[Shape]:
    if stages == 1:
        return list(whole.ends)
    return whole.first() if index == 0 else whole.last() if index == stages - 1 else []


def _state(part: Part, recipe: Recipe, casts: Casts, spread: Spread, *, wide_grad: bool) -> dict[str, int]:
    def here(shapes: Sequence[Shape]) -> list[Shape]:
        return [p.sharded(spread.shard) for p in shapes] if spread.shard > 1 else list(shapes)

    counts: Counter[Shape] = counted(here(part.whole.block), part.blocks) + counted(here(part.ends))
    found = total(counts, recipe, wide_grad=wide_grad)
    if spread.shard > 1 and not is_cast(recipe.grad):
        # wide gradients are views of one buffer, in which those of small ones stay beside their copies
        small = {p: n for p, n in counts.items() if p.numel < recipe.min_state_size}
        found["grad"] += sum(n * grad_bytes(p, recipe, wide_grad=wide_grad) for p, n in small.items())
    layers = [*casts.of_blocks(part.numbers), *(casts.others if part.is_last else ())]
    found["scaling"] = sum(scaling_bytes(each.recipe) for each in layers if each.is_quantized)
    found["buffer"] = part.whole.buffers
    return found


def _activation(part: Part, recipe: Recipe, casts: Casts, spread: Spread, step: Step, found: Saved) -> int:
    """Of all micro-batches under way, parted over tensor-parallel ranks by sequence parallelism."""
    ranks = spread.tensor
    # gathered weights are the codes that are kept, and freed after forward
    freed = [_gathered_codes(kind) if spread.shard > 1 else 0 for kind in casts.kinds]
    # torch's own layers, of a float32 recipe, save the inputs that they have gathered
    whole_inputs = 0
    if ranks > 1 and recipe.compute is FP32 and not recipe.tf32:
        whole_inputs = 2 * step.rows * part.whole.config.width * FLOAT * (ranks - 1) // ranks
    blocks, inside = 0, 0
    for at in part.numbers:
        of_block, recomputed = found.of_block(at)
        codes = freed[casts.kind_of[at]]
        if step.recomputes:
            blocks += -(-of_block // ranks)
            inside = max(inside, -(-(recomputed - codes) // ranks) + whole_inputs)
        else:
            blocks += -(-(of_block - codes) // ranks) + whole_inputs
    of_ends = (found.first if part.is_first else 0) + (found.last if part.is_last else 0)
    once = blocks + -(-of_ends // ranks) + (whole_inputs // 2 if part.is_last else 0)
    under_way = min(step.accumulation, part.stages - part.index)
    return once * under_way + inside


def _gathered_codes(layers: Sequence[LayerCast]) -> int:
    """Bytes of codes that wait for gradients of inputs, of weights that travel as these codes."""
    return sum(
        weight_codes(each.layer, each.recipe)
        for each in layers
        if _is_operand(each) and not is_multiplied_as_stored(each.recipe)
    )


def _logits(part: Part, recipe: Recipe, spread: Spread, step: Step) -> int:
    """Logits and two gradients of them in float32, beside the normalized ones that are saved."""
    vocabulary = -(-part.whole.config.vocab_size // spread.tensor)
    itemsize = recipe.compute_dtype.itemsize
    if spread.tensor > 1 and itemsize == FLOAT:
        itemsize = 0  # the loss over parts of a vocabulary saves the logits themselves
    return step.rows * vocabulary * (itemsize + 2 * FLOAT)


def _is_operand(layer: LayerCast) -> bool:
    """Whether its weight travels as the operand of its products."""
    return layer.is_quantized and plan_wire.operand_cast(layer.recipe) is not None


class Units(NamedTuple):
    """What FSDP2 gathers at once: a block of each kind, and all else."""

    blocks: list[Unit]
    ends: Unit


def _units(part: Part, casts: Casts) -> Units:
    def operands(layers: Sequence[LayerCast]) -> frozenset[str]:
        return frozenset(f"{each.layer.name}.weight" for each in layers if _is_operand(each))

    blocks = [Unit(part.whole.block, operands(kind)) for kind in casts.kinds]
    return Units(blocks, Unit(list(part.ends), operands(casts.others)))


def _gathered(part: Part, recipe: Recipe, casts: Casts, spread: Spread, units: Units) -> int:
    """Bytes of parameters that are whole at once: of the block that runs and the next, and of what is in none."""
    of_kinds = [plan_wire.gathered_bytes(unit, recipe) for unit in units.blocks]
    sizes = [of_kinds[casts.kind_of[at]] for at in part.numbers]
    at_once = plan_wire.PREFETCHED if spread.reshard else len(sizes)
    runs = [sum(sizes[at : at + at_once]) for at in range(max(1, len(sizes) - at_once + 1))]
    return max(runs) + plan_wire.gathered_bytes(units.ends, recipe)


def _sent(
    part: Part, recipe: Recipe, casts: Casts, spread: Spread, step: Step, units: Units, itemsize: int
) -> dict[str, int]:
    """itemsize: of the values between the blocks."""
    sent: Counter[str] = Counter()
    micro = step.accumulation
    if spread.shard > 1:
        of_kinds = Counter(casts.kind_of[at] for at in part.numbers)
        for unit, times in [*((units.blocks[kind], times) for kind, times in of_kinds.items()), (units.ends, 1)]:
            gathers = 2 if spread.reshard else 1
            sent["param_comm"] += micro * times * gathers * plan_wire.param_comm(unit, recipe, spread.shard)
            sent["grad_comm"] += micro * times * plan_wire.scattered(unit, recipe, spread)
    elif spread.data > 1:
        for shapes, times in ((part.whole.block, part.blocks), (part.ends, 1)):
            sent["grad_comm"] += times * plan_wire.averaged(shapes, recipe, spread.data)
    if spread.tensor > 1:
        for shapes, times in ((part.whole.block, part.blocks), (part.ends, 1)):
            sent["grad_comm"] += micro * times * plan_wire.partial_sums(shapes, recipe, spread.tensor)
        sent["activation_comm"] += micro * _exchanged(part, recipe, casts, spread, step)
    if spread.pipeline > 1:
        ends = part.is_first + part.is_last
        once = plan_wire.boundary(part.whole, recipe, spread.tensor, step.rows, itemsize)
        sent["pipeline_comm"] += micro * (2 - ends) * once
        table = next((p for p in part.whole.ends if p.name == "embedding.weight"), None)
        if ends and table is not None and part.whole.config.tied_embeddings:
            held = table.sharded(spread.shard) if spread.shard > 1 else table
            sent["grad_comm"] += plan_wire.tied(held, recipe)
    return dict(sent)


def _exchanged(part: Part, recipe: Recipe, casts: Casts, spread: Spread, step: Step) -> int:
    """Activations of one micro-batch."""
    width = part.whole.config.width
    plain = Exchanged(recipe, spread.tensor, step.rows)

    def of_layer(each: LayerCast) -> Traffic:
        exchanged = Exchanged(each.recipe, spread.tensor, step.rows)
        is_row = each.layer.name.endswith((".out", ".down"))
        return (exchanged.row if is_row else exchanged.column)(width, each.is_quantized)

    def of_block(layers: Sequence[LayerCast]) -> int:
        block = [of_layer(each) for each in layers]
        once = sum(each.forward + each.backward for each in block)
        if not step.recomputes:
            return once
        # recomputation ends with the last tensor that is saved, before torch's own last layer sums its output
        ends_early = plain.is_plain and not layers[-1].is_quantized
        return once + sum(each.forward for each in block) - (block[-1].forward if ends_early else 0)

    of_kinds = [of_block(layers) for layers in casts.kinds]
    ends = [plain.table(width)] if part.is_first else []
    ends += [of_layer(each) for each in casts.others] if part.is_last else []
    return sum(of_kinds[casts.kind_of[at]] for at in part.numbers) + sum(each.forward + each.backward for each in ends)

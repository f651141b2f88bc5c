"""One rank of a layout: the bytes that its stage holds by role, and those that it sends in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from narrowgauge.layers.gradient_hooks import is_cast
from narrowgauge.models.config import GPTConfig
from narrowgauge.numerics.formats import FP32
from narrowgauge.observe import plan_wire
from narrowgauge.observe.plan_activations import Saved
from narrowgauge.observe.plan_layout import BLOCK, Outline, Spread, blocks_of_stages, counted, outline
from narrowgauge.observe.plan_state import FLOAT, Shape, grad_bytes, quantized, scaling_bytes, total
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
    """What a stage has of a model. index: of the stage. blocks: how many. ends: parameters beside them."""

    whole: Outline
    index: int
    stages: int
    blocks: int
    ends: Sequence[Shape]

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
    blocks = part.blocks
    found = _state(part, recipe, spread, wide_grad=step.accumulation > 1 or spread.pipeline > 1)
    grads_before = found["grad"] if step.accumulation > 1 or spread.pipeline > 1 else 0
    found["activation"] = _activation(part, recipe, spread, step, activations)
    found["logits"] = _logits(part, recipe, spread, step) if part.is_last else 0
    units = _units(part, recipe)
    if spread.shard > 1:
        sizes = [plan_wire.gathered_bytes(unit, recipe) for unit in units]
        at_once = min(plan_wire.PREFETCHED, blocks) if spread.reshard else blocks
        found["gathered"] = at_once * sizes[0] + sizes[1]
    found |= reduced([*part.whole.block, *part.ends], units, recipe, spread, blocks)
    return Rank(found, grads_before, _sent(part, recipe, spread, step, units, activations))


def parts(config: GPTConfig, spread: Spread) -> list[Part]:
    """Of all stages. Raises ConfigError where the model does not divide so."""
    whole = outline(config, spread.tensor)
    stages = blocks_of_stages(config, spread.pipeline)
    return [Part(whole, at, len(stages), blocks, _ends(whole, at, len(stages))) for at, blocks in enumerate(stages)]


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


def _state(part: Part, recipe: Recipe, spread: Spread, *, wide_grad: bool) -> dict[str, int]:
    def here(shapes: Sequence[Shape]) -> list[Shape]:
        return [p.sharded(spread.shard) for p in shapes] if spread.shard > 1 else list(shapes)

    counts: Counter[Shape] = counted(here(part.whole.block), part.blocks) + counted(here(part.ends))
    found = total(counts, recipe, wide_grad=wide_grad)
    if spread.shard > 1 and not is_cast(recipe.grad):
        # wide gradients are views of one buffer, in which those of small ones stay beside their copies
        small = {p: n for p, n in counts.items() if p.numel < recipe.min_state_size}
        found["grad"] += sum(n * grad_bytes(p, recipe, wide_grad=wide_grad) for p, n in small.items())
    chosen = quantized(part.whole.all_layers, recipe)
    # every stage has as many quantized layers as its blocks are a part of all
    scaling = sum(scaling_bytes(recipe.for_layer(name)) for name, is_quantized in chosen.items() if is_quantized)
    if part.stages > 1:
        scaling = -(-scaling * part.blocks // part.whole.config.layers)
    found["scaling"] = scaling
    found["buffer"] = part.whole.buffers
    return found


def _activation(part: Part, recipe: Recipe, spread: Spread, step: Step, found: Saved) -> int:
    """Of all micro-batches under way, parted over tensor-parallel ranks by sequence parallelism."""
    ranks = spread.tensor
    codes = found.weights
    # gathered weights are those codes, and freed after forward
    has_codes = spread.shard == 1 or plan_wire.operand_cast(recipe) is None
    inside, block = found.inside, found.block
    if step.recomputes:
        inside -= 0 if has_codes else codes
    else:
        block -= 0 if has_codes else codes
    # torch's own layers, of a float32 recipe, save the inputs that they have gathered
    whole_inputs = 0
    if ranks > 1 and recipe.compute is FP32 and not recipe.tf32:
        whole_inputs = 2 * step.rows * part.whole.config.width * FLOAT * (ranks - 1) // ranks
    of_block = -(-block // ranks) + (0 if step.recomputes else whole_inputs)
    of_inside = -(-inside // ranks) + (whole_inputs if step.recomputes else 0)
    of_ends = (found.first if part.is_first else 0) + (found.last if part.is_last else 0)
    once = part.blocks * of_block + -(-of_ends // ranks) + (whole_inputs // 2 if part.is_last else 0)
    under_way = min(step.accumulation, part.stages - part.index)
    return once * under_way + of_inside


def _logits(part: Part, recipe: Recipe, spread: Spread, step: Step) -> int:
    """Logits and two gradients of them in float32, beside the normalized ones that are saved."""
    vocabulary = -(-part.whole.config.vocab_size // spread.tensor)
    itemsize = recipe.compute_dtype.itemsize
    if spread.tensor > 1 and itemsize == FLOAT:
        itemsize = 0  # the loss over parts of a vocabulary saves the logits themselves
    return step.rows * vocabulary * (itemsize + 2 * FLOAT)


def _units(part: Part, recipe: Recipe) -> list[Unit]:
    """A block, and all else."""
    layers = part.whole.layers
    names = {each.name for each in layers} if plan_wire.operand_cast(recipe) is not None else set()
    chosen = quantized(layers, recipe.replace(first_last=(0, 0)))
    operands = frozenset(f"{name}.weight" for name in names if chosen[name])
    untied = operands - {"embedding.weight"}
    return [Unit(part.whole.block, untied), Unit(list(part.ends), untied)]


def _sent(
    part: Part, recipe: Recipe, spread: Spread, step: Step, units: Sequence[Unit], activations: Saved
) -> dict[str, int]:
    sent: Counter[str] = Counter()
    micro = step.accumulation
    if spread.shard > 1:
        for unit, times in ((units[0], part.blocks), (units[1], 1)):
            gathers = 2 if spread.reshard else 1
            sent["param_comm"] += micro * times * gathers * plan_wire.param_comm(unit, recipe, spread.shard)
            sent["grad_comm"] += micro * times * plan_wire.scattered(unit, recipe, spread)
    elif spread.data > 1:
        for shapes, times in ((part.whole.block, part.blocks), (part.ends, 1)):
            sent["grad_comm"] += times * plan_wire.averaged(shapes, recipe, spread.data)
    if spread.tensor > 1:
        for shapes, times in ((part.whole.block, part.blocks), (part.ends, 1)):
            sent["grad_comm"] += micro * times * plan_wire.partial_sums(shapes, recipe, spread.tensor)
        sent["activation_comm"] += micro * _exchanged(part, recipe, spread, step)
    if spread.pipeline > 1:
        ends = part.is_first + part.is_last
        once = plan_wire.boundary(part.whole, recipe, spread.tensor, step.rows, activations.stream.itemsize)
        sent["pipeline_comm"] += micro * (2 - ends) * once
        table = next((p for p in part.whole.ends if p.name == "embedding.weight"), None)
        if ends and table is not None and part.whole.config.tied_embeddings:
            held = table.sharded(spread.shard) if spread.shard > 1 else table
            sent["grad_comm"] += plan_wire.tied(held, recipe)
    return dict(sent)


def _last(whole: Outline) -> str:
    """The last layer of a block."""
    return [each.name for each in whole.layers if each.name.startswith(BLOCK)][-1]


def _exchanged(part: Part, recipe: Recipe, spread: Spread, step: Step) -> int:
    """Activations of one micro-batch."""
    exchanged = Exchanged(recipe, spread.tensor, step.rows)
    config = part.whole.config
    chosen = quantized(part.whole.layers, recipe.replace(first_last=(0, 0)))

    def of_layer(name: str) -> Traffic:
        is_row = name.endswith((".out", ".down"))
        return (exchanged.row if is_row else exchanged.column)(config.width, chosen[name])

    block = [of_layer(each.name) for each in part.whole.layers if each.name.startswith(BLOCK)]
    once = sum(each.forward + each.backward for each in block)
    if step.recomputes:
        again = sum(each.forward for each in block)
        # recomputation ends with the last tensor that is saved, before torch's own last layer sums its output
        once += again - (block[-1].forward if exchanged.is_plain and not chosen[_last(part.whole)] else 0)
    total_ = part.blocks * once
    ends = [exchanged.table(config.width)] if part.is_first else []
    ends += [of_layer("lm_head")] if part.is_last else []
    return total_ + sum(each.forward + each.backward for each in ends)

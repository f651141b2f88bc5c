"""What a training run takes, before there are machines: bytes on each GPU by role, and bytes sent in a step.

State is by closed formulas (`plan_state`), activations by the real forward pass without values (`plan_activations`),
what travels by formulas of the distributed code (`plan_wire`). Everything is of the rank that needs the most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from narrowgauge.distributed.pipeline_schedule import schedule_named
from narrowgauge.errors import ConfigError, closest
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT
from narrowgauge.models.presets import preset
from narrowgauge.observe import plan_rank
from narrowgauge.observe.plan_activations import Saved, saved, saved_by
from narrowgauge.observe.plan_layers import casts_of
from narrowgauge.observe.plan_layout import Spread, count
from narrowgauge.observe.plan_rank import Step
from narrowgauge.observe.plan_state import layers_of, quantized, scaling_bytes, shapes_of, total
from narrowgauge.recipes import library
from narrowgauge.recipes.spec import Recipe

STATE = ("param", "master", "grad", "exp_avg", "exp_avg_sq", "step", "scaling", "buffer")
PASSING = ("activation", "logits", "gathered", "reduced")  # what comes and goes within a step
FRAGMENTATION = "fragmentation"
ROLES = (*STATE, *PASSING, FRAGMENTATION)
# an allowance, not a count: what an allocator holds and cannot use, as a share of what comes and goes
FRAGMENTATION_SHARE = 0.1
CHECKPOINTING = ("none", "full")
MOST_TOKENS = 1 << 32


@dataclass(frozen=True)
class Plan:
    """Bytes of one training step on the rank that needs the most.

    model, recipe: names. parameters: of the whole model. bytes: by role, each at its largest: the state; `activation`,
    what is saved for backward, quantized as the recipe saves it, of all micro-batches under way; `logits`, with their
    gradients, beside what is saved of them; `gathered`, whole parameters under FSDP2; `reduced`, gradients on their way
    from backward to where they are kept; `fragmentation`, an allowance: a tenth of what comes and goes. peak: the most
    that is there at one time: gradients and activations are not both at their largest where a step has one micro-batch.
    wire: bytes sent in a step, by the recipe's communication roles. own_casts: how many layers the recipe names for
    casts of their own, and of how many; those that it does not name multiply as the recipe says for all.
    """

    model: str
    recipe: str
    parameters: int
    spread: Spread
    batch_size: int
    sequence_length: int
    accumulation: int
    checkpointing: str
    bytes: Mapping[str, int]
    peak: int
    wire: Mapping[str, int] = field(default_factory=dict)
    own_casts: tuple[int, int] | None = None

    @property
    def state(self) -> int:
        """Bytes that stay from step to step, with the gradients: the ledger's total."""
        return sum(self.bytes.get(role, 0) for role in STATE)

    @property
    def tokens(self) -> int:
        """Of a step, of all ranks."""
        return self.batch_size * self.sequence_length * self.accumulation * self.spread.readers

    def missing(self, memory_bytes: float) -> int:
        """Bytes above a budget for each GPU; negative: what is left of it."""
        return self.peak - int(memory_bytes)

    def rows(self) -> list[tuple[str, int]]:
        """(role, bytes), with the peak at the end."""
        return [(role, self.bytes[role]) for role in ROLES if self.bytes.get(role)] + [("peak", self.peak)]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("model", "recipe", "parameters", "batch_size", "sequence_length", "accumulation", "checkpointing")
        layout = {name: getattr(self.spread, name) for name in ("data", "shard", "tensor", "pipeline", "reshard")}
        return {name: getattr(self, name) for name in names} | {
            "parallel": layout, "bytes": dict(self.bytes), "state": self.state, "peak": self.peak,
            "wire": dict(self.wire), "tokens": self.tokens, "own_casts": self.own_casts,
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"{self.model} by {self.recipe}, {self.spread}: bytes on the GPU that needs the most"]
        lines += [f"{role:<14} {size:>18,}" for role, size in self.rows()]
        lines += [f"{f'sent, {role}':<22} {size:>18,} a step" for role, size in self.wire.items()]
        return "\n".join(lines)


def plan(
    model: str | GPTConfig | nn.Module,
    recipe: str | Recipe,
    spread: Spread | None = None,
    *,
    batch_size: int = 1,
    sequence_length: int | None = None,
    accumulation: int = 1,
    checkpointing: str = "none",
    run: Callable[[nn.Module], Tensor] | None = None,
) -> Plan:
    """What training `model` by `recipe` with AdamW takes on each rank of a layout.

    model: the name of a preset, a GPT's config, a GPT, or any model, best built on the meta device. batch_size,
    sequence_length (None: the context), accumulation: as `train` has them. checkpointing: "none", or "full", which
    recomputes each block in backward. run: for a model that is no GPT: makes the inputs, calls the model and returns
    what backward begins with; without it there is nothing to learn activations from. Such a model is prepared and of no
    use afterwards, and may be spread by data alone.

    Raises ConfigError for names, numbers and layouts that do not fit, RecipeError for an unknown recipe.
    """
    resolved = library.recipe(recipe).resolve("cpu").at(0)
    spread = Spread() if spread is None else spread
    for name, value in (("batch_size", batch_size), ("accumulation", accumulation)):
        count(name, value, MOST_TOKENS)
    check_checkpointing(checkpointing)
    if isinstance(model, nn.Module) and not isinstance(model, GPT):
        return _plan_any(model, resolved, spread, batch_size, accumulation, run)
    name, config = config_of(model)
    tokens = config.context if sequence_length is None else count("sequence_length", sequence_length, MOST_TOKENS)
    step = Step(batch_size, tokens, accumulation, checkpointing == "full")
    plan_rank.parts(config, spread)
    check(spread, step)
    activations = saved(config, resolved, batch_size, tokens, step.recomputes)
    return plan_gpt(config, resolved, spread, step, activations, name)


def check(spread: Spread, step: Step) -> None:
    """Raise ConfigError for a step that a layout cannot take."""
    if spread.pipeline > 1:
        schedule_named("1f1b").check_micro_batches(step.accumulation, spread.pipeline)
    if step.tokens % spread.tensor:
        raise ConfigError(
            f"sequence_length={step.tokens} does not divide into parallel.tensor={spread.tensor} parts: sequence "
            "parallelism parts the tokens; change either"
        )


def plan_gpt(
    config: GPTConfig, recipe: Recipe, spread: Spread, step: Step, activations: Saved, name: str = "GPT"
) -> Plan:
    """`plan` of a GPT by a resolved recipe, where it is known what one process saves for backward."""
    stages = [plan_rank.of_stage(config, recipe, spread, step, activations, at) for at in range(spread.pipeline)]
    worst = max(stages, key=lambda each: _peak(each.bytes, each.grads_before))
    found = dict(worst.bytes)
    peak = _peak(found, worst.grads_before)
    found[FRAGMENTATION] = peak - _peak(found, worst.grads_before, share=0.0)
    sent = max(stages, key=lambda each: sum(each.wire.values())).wire
    return Plan(
        name, recipe.name, plan_rank.parameters(config), spread, step.batch, step.tokens, step.accumulation,
        "full" if step.recomputes else "none", {role: found[role] for role in ROLES if found.get(role)}, peak,
        {role: size for role, size in sent.items() if size},
        casts_of(config, recipe).own if recipe.layers else None,
    )  # fmt: skip


def check_checkpointing(checkpointing: str) -> None:
    """Raise ConfigError for what the library's models do not have."""
    if checkpointing not in CHECKPOINTING:
        raise ConfigError(
            f"checkpointing={checkpointing!r}: expected none or full (each block is recomputed, or nothing is)"
            f"{closest(str(checkpointing), CHECKPOINTING)}"
        )


def config_of(model: str | GPTConfig | GPT) -> tuple[str, GPTConfig]:
    """(name, config) of a preset's name, a config or a GPT."""
    if isinstance(model, str):
        return model, preset(model)
    config = model.config if isinstance(model, GPT) else model
    if not isinstance(config, GPTConfig):
        raise ConfigError(
            f"model={model!r}: expected a preset's name, a GPTConfig, or a torch.nn.Module, built on the meta device"
        )
    return f"GPT, {config.layers} x {config.width}", config


def _peak(found: Mapping[str, int], grads_before: int, share: float = FRAGMENTATION_SHARE) -> int:
    """The most at one time: when backward begins, with the activations; or when it ends, with the gradients."""
    stays = sum(found.get(role, 0) for role in STATE if role != "grad")
    both = found.get("gathered", 0) + found.get("reduced", 0)
    begins = found.get("activation", 0) + found.get("logits", 0)
    at_begin = grads_before + begins + round(share * (begins + both))
    at_end = found.get("grad", 0) + round(share * both)
    return stays + both + max(at_begin, at_end)


def _plan_any(
    model: nn.Module,
    recipe: Recipe,
    spread: Spread,
    batch_size: int,
    accumulation: int,
    run: Callable[[nn.Module], Tensor] | None,
) -> Plan:
    name = type(model).__name__
    if run is None:
        raise ConfigError(
            f"{name} has no config from which its inputs follow: expected run=, a function that makes inputs, calls "
            "the model and returns the loss; or a preset's name, or a GPTConfig"
        )
    if spread.ranks != spread.data:
        raise ConfigError(
            f"parallel {spread}: {name} is no GPT, and how its layers would be parted is not known here: expected "
            "data alone"
        )
    shapes, layers = shapes_of(model), layers_of(model)
    buffers = sum(b.nbytes for b in model.buffers())
    chosen = quantized(layers, recipe)
    counts: dict[Any, int] = {}
    for each in shapes:
        counts[each] = counts.get(each, 0) + 1
    found = total(counts, recipe, wide_grad=accumulation > 1)
    found["scaling"] = sum(
        each.experts * scaling_bytes(recipe.for_layer(each.name)) for each in layers if chosen[each.name]
    )
    found["buffer"] = buffers
    found |= plan_rank.reduced(shapes, [], recipe, spread)
    wire = plan_rank.averaged(shapes, recipe, spread.data)
    found["activation"] = saved_by(model, recipe, run)
    grads_before = found["grad"] if accumulation > 1 else 0
    peak = _peak(found, grads_before)
    found[FRAGMENTATION] = peak - _peak(found, grads_before, share=0.0)
    return Plan(
        name, recipe.name, sum(p.numel for p in shapes), spread, batch_size, 0, accumulation, "none",
        {role: found[role] for role in ROLES if found.get(role)}, peak, wire,
    )  # fmt: skip

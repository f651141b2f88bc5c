"""The best layout for a model on N GPUs of so much memory, and the largest model that fits them.

Of the layouts that fit, the best is the one that part of `docs/distributed.md`, "How to choose", would take: as few
pipeline stages as there can be, then as few tensor-parallel ranks, then the fewest bytes sent.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from narrowgauge.errors import ConfigError
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT
from narrowgauge.models.presets import preset, preset_names
from narrowgauge.observe.plan_activations import Saved, extrapolated, saved
from narrowgauge.observe.plan_layout import MOST_RANKS, Spread, count, outline
from narrowgauge.observe.plan_rank import Step
from narrowgauge.observe.planner import MOST_TOKENS, Plan, check_checkpointing, config_of, plan, plan_gpt
from narrowgauge.recipes import library
from narrowgauge.recipes.spec import Recipe

GB = 10**9  # bytes; what a GPU is sold as holds some more, of which its driver takes a part
MACHINE = 8  # GPUs: tensor-parallel ranks share one
STAGES = (1, 2, 4, 8, 16)
MICRO_BATCHES_A_STAGE = 4  # with fewer, a pipeline leaves much of its time unused
AUTO = "auto"
FAMILY_WIDTH = 128  # of the stream, for each block: that of GPT-3's 6.7B, 13B and 175B
FAMILY_HEADS = 64, 128  # below 128 blocks, and from there on: what tensor-parallel ranks divide
MOST_GB = 10**6
LARGEST_FAMILY = 2048  # blocks
FAMILY_KNOWN = (8, 16, 24)  # blocks of members whose forward pass is run
Learn = Callable[[GPTConfig, Recipe, int, int, bool], Saved]


@dataclass(frozen=True)
class Work:
    """What a step is to be, whatever the layout: see `planner.plan`.

    sequence_length None: the model's context. checkpointing: "none", "full", or "auto": none where that fits.
    """

    batch_size: int = 1
    sequence_length: int | None = None
    accumulation: int = 1
    checkpointing: str = AUTO

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation"):
            count(name, getattr(self, name), MOST_TOKENS)
        if self.sequence_length is not None:
            count("sequence_length", self.sequence_length, MOST_TOKENS)
        if self.checkpointing != AUTO:
            check_checkpointing(self.checkpointing)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of checkpointing to try, in order."""
        return ("none", "full") if self.checkpointing == AUTO else (self.checkpointing,)

    def step(self, config: GPTConfig, checkpointing: str) -> Step:
        """Of a model."""
        tokens = self.sequence_length or config.context
        return Step(self.batch_size, tokens, self.accumulation, checkpointing == "full")


@dataclass(frozen=True)
class Answer:
    """plan: of the best layout that fits, else of the one that needs the least. fits: whether it does."""

    plan: Plan
    memory_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the peak lies within the budget."""
        return self.plan.peak <= self.memory_bytes


def best(
    model: str | GPTConfig | GPT, recipe: str | Recipe, gpus: int, memory_gb: float, work: Work | None = None
) -> Answer:
    """The best layout of `gpus` ranks, each of `memory_gb` * 10^9 bytes.

    Raises ConfigError for numbers out of range.
    """
    work = work or Work()
    budget = check_budget(gpus, memory_gb)
    name, config = config_of(model)
    resolved = _resolved(recipe)
    found: list[Plan] = []
    for checkpointing in work.kinds:
        step = work.step(config, checkpointing)
        activations = saved(config, resolved, step.batch, step.tokens, step.recomputes)
        for _, group in itertools.groupby(layouts(config, gpus, work), key=lambda s: (s.pipeline, s.tensor)):
            plans = [plan_gpt(config, resolved, spread, step, activations, name) for spread in group]
            fitting = [each for each in plans if each.peak <= budget]
            if fitting:
                return Answer(min(fitting, key=lambda each: sum(each.wire.values())), budget)
            found += plans
    return Answer(min(found, key=lambda each: each.peak), budget)


def _resolved(recipe: str | Recipe) -> Recipe:
    return library.recipe(recipe).resolve("cpu").at(0)


def given(
    model: str | GPTConfig | GPT,
    recipe: str | Recipe,
    spread: Spread,
    gpus: int,
    memory_gb: float,
    work: Work | None = None,
) -> Answer:
    """This layout, which is to have all GPUs.

    Raises ConfigError where it has not, and where the model does not divide so.
    """
    work = work or Work()
    budget = check_budget(gpus, memory_gb)
    if spread.ranks != gpus:
        raise ConfigError(
            f"parallel {spread} is of {spread.ranks} ranks, and there are {gpus} GPUs: expected as many; change a "
            "size, or leave all of them out for the best layout"
        )
    answers = [
        Answer(
            plan(
                model,
                recipe,
                spread,
                batch_size=work.batch_size,
                sequence_length=work.sequence_length,
                accumulation=work.accumulation,
                checkpointing=kind,
            ),
            budget,
        )
        for kind in work.kinds
    ]
    return next((answer for answer in answers if answer.fits), answers[-1])


def fits(config: GPTConfig, recipe: Recipe, gpus: int, budget: int, work: Work, learn: Learn = saved) -> bool:
    """Whether any layout does, by a resolved recipe; of replicas and shards those that are all shards need the least.

    learn: what one process saves for backward, as `plan_activations.saved`.
    """
    spreads = [s for s in layouts(config, gpus, work) if s.data == 1 or s.pipeline > 1]

    def any_fits(kind: str, of_step: Callable[[Step], Saved]) -> bool:
        step = work.step(config, kind)
        activations = of_step(step)
        return any(plan_gpt(config, recipe, spread, step, activations).peak <= budget for spread in spreads)

    if not any_fits(work.kinds[-1], lambda step: Saved.nothing()):  # quick: no forward pass is run
        return False
    return any(
        any_fits(kind, lambda step: learn(config, recipe, step.batch, step.tokens, step.recomputes))
        for kind in reversed(work.kinds)
    )


def largest(
    recipe: str | Recipe, gpus: int, memory_gb: float, work: Work | None = None
) -> tuple[str | None, GPTConfig | None]:
    """(largest preset, largest of the family) that fits; None: not even the smallest does.

    Presets are compared by parameters. Raises ConfigError for numbers out of range.
    """
    work = work or Work()
    budget = check_budget(gpus, memory_gb)
    resolved = check_family(recipe)
    by_size = sorted(preset_names(), key=lambda name: -outline(preset(name)).parameters)
    found = next((name for name in by_size if fits(preset(name), resolved, gpus, budget, work)), None)
    blocks = largest_of_family(resolved, gpus, budget, work)
    return found, None if blocks == 0 else family(blocks)


def check_family(recipe: str | Recipe) -> Recipe:
    """The resolved recipe. Raises ConfigError where it names layers, of one model, and no other has them."""
    resolved = _resolved(recipe)
    if resolved.layers:
        raise ConfigError(
            f"recipe '{resolved.name}' has casts for layers of one model by name, and the largest model is looked for "
            "among many: expected a recipe without; leave out the largest model and the picture, or use another recipe"
        )
    return resolved


def largest_of_family(recipe: Recipe, gpus: int, budget: int, work: Work) -> int:
    """Blocks of the largest member that fits, by a resolved recipe; 0 for none."""

    def holds(number: int) -> bool:
        return fits(family(number), recipe, gpus, budget, work, _saved_in_family)

    return _last(holds, LARGEST_FAMILY)


def _saved_in_family(config: GPTConfig, recipe: Recipe, batch: int, tokens: int, recomputes: bool) -> Saved:
    """`plan_activations.saved` of a member, from three small ones."""
    known = {n: saved(family(n, config.heads), recipe, batch, tokens, recomputes) for n in FAMILY_KNOWN}
    return extrapolated(config.layers, known)


@functools.lru_cache(maxsize=4096)
def family(blocks: int, heads: int | None = None) -> GPTConfig:
    """A GPT like GPT-3's of so many blocks, 128 features wide for each; of the size of its 6.7B, 13B, 175B: 32, 40, 96.

    heads: None: a power of two near the number of blocks.
    """
    heads = heads or FAMILY_HEADS[blocks >= FAMILY_HEADS[1]]
    return preset("gpt-175b", layers=blocks, width=FAMILY_WIDTH * blocks, heads=heads)


def check_budget(gpus: int, memory_gb: float) -> int:
    """Bytes of a GPU. Raises ConfigError for what no cluster has."""
    count("gpus", gpus, MOST_RANKS)
    if isinstance(memory_gb, bool) or not isinstance(memory_gb, (int, float)) or not 0 < memory_gb <= MOST_GB:
        raise ConfigError(f"memory_gb={memory_gb!r}: expected a number of gigabytes above 0, at most {MOST_GB:,}")
    return int(memory_gb * GB)


def layouts(config: GPTConfig, gpus: int, work: Work) -> Iterator[Spread]:
    """Layouts that divide the model, in order of preference: by stages, then tensor-parallel ranks."""
    tokens = work.sequence_length or config.context
    for stages in STAGES:
        if (
            gpus % stages
            or stages > config.layers
            or (stages > 1 and work.accumulation < MICRO_BATCHES_A_STAGE * stages)
        ):
            continue
        for tensor in (1, 2, 4, 8):
            rest = gpus // stages
            divides = all(size % tensor == 0 for size in (config.heads, config.key_value_heads, config.hidden_width))
            if rest % tensor or tensor > min(MACHINE, rest) or not divides or tokens % tensor:
                continue
            rest //= tensor
            yield Spread(data=rest, tensor=tensor, pipeline=stages)
            for shard in _shards(rest):
                yield Spread(data=rest // shard, shard=shard, tensor=tensor, pipeline=stages)


def _shards(ranks: int) -> list[int]:
    """Powers of two, and all: what people part over."""
    powers = [2**n for n in range(1, ranks.bit_length()) if ranks % 2**n == 0]
    return list(dict.fromkeys([*powers, ranks])) if ranks > 1 else []


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The last number from 1 to `most` that holds, where all before it do; 0 for none."""
    low, step = 0, 1
    while low + step <= most and holds(low + step):
        low, step = low + step, 2 * step
    high = min(low + step, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low

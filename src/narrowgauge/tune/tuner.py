"""From a model, its data and a budget to a recipe: measure each layer, choose, verify by short runs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from narrowgauge.data.loader import BatchStream
from narrowgauge.data.prepare import Dataset, prepare_data
from narrowgauge.errors import ConfigError
from narrowgauge.models.gpt import GPT
from narrowgauge.observe.journal import Journal
from narrowgauge.preparation import prepare
from narrowgauge.recipes.spec import STATE_ROLES, Recipe
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.trained import Trained
from narrowgauge.tune import program
from narrowgauge.tune.choices import Assignment, Choice, choices_of, ends, put, recipe_of, tunable, wide
from narrowgauge.tune.estimate import Estimates
from narrowgauge.tune.measure import Batch, Costs, Measured, costs_of, measure, slope_of
from narrowgauge.tune.options import HAND_RULES, OnProgress, Options, Progress, ignore
from narrowgauge.tune.program import Budget, Point, Problem
from narrowgauge.tune.result import HAND, TUNED, Contender, Tuned
from narrowgauge.tune.verify import ShortRun, Weights, for_short_runs, model_with, short_run, weights_of

_HAND_NAMES = {0: "first and last layer wide: too big", 1: "first and last layer wide"}
_ORDER_SEED = 7919  # of the measured batches' order: another one than that of the runs


@dataclass(frozen=True)
class Start:
    """A model that has learnt already. slope: nats that e times as many steps gain, see `measure.slope_of`."""

    weights: Weights
    slope: float

    @classmethod
    def of_run(cls, run: Path | str) -> Start:
        """Of a finished run: its weights with all their digits, and the slope of its losses."""
        trained = Trained.open(run, device="cpu", prepared=False)
        steps = Journal(trained.folder.path).steps
        return cls(weights_of(trained.model), slope_of([float(loss) for loss in steps["loss"]]))


def tune(config: TrainConfig, options: Options, on_progress: OnProgress = ignore, start: Start | None = None) -> Tuned:
    """Choose a precision for each linear layer of the model, within the budget, and verify the choice.

    Everything but the layers' products is as the configuration's recipe has it: storage, states, what is sent. The
    model is warmed up by a short run with all layers wide, or begins as `start`. Layers are then measured one by one on
    training text, choices solved for, and each contender trained for `options.steps` steps from the same weights on the
    same batches; held-out text, which none of this has read, decides. Nothing is written.

    Raises ConfigError for a budget that nothing meets (naming the nearest), a model without layers to choose for, too
    little text; RecipeError for choices that do not exist; DataError for text that cannot be used.
    """
    begin_s = time.perf_counter()
    program.require()
    _check(config)
    config.check()
    if config.threads:
        torch.set_num_threads(config.threads)
    base = config.build_recipe().resolve(config.torch_device()).at(0)
    choices = {choice.name: choice for choice in choices_of(base, options.choices)}
    if start is None and options.steps < 2:
        raise ConfigError(
            f"steps={options.steps}: expected at least 2 without a start: a model that has not learnt anything says "
            "little; raise steps, or give a run"
        )
    dataset = prepare_data(config.data.build(), config.cache_dir, lambda what: on_progress(Progress(what, 0, 1)))
    work = _Work(config, options, base, choices, dataset, start and start.weights, on_progress)
    model, layers, costs, tokens = work.look()
    budget = _budget(_problem(layers, costs, tokens, choices), layers, options)
    program.check(_problem(layers, costs, tokens, choices), budget)
    reference, warm = work.run(wide(base), "all layers wide", config.seed)
    begun = start or Start(warm, slope_of(reference.losses))
    model.load_state_dict(dict(begun.weights))
    measured = work.measure(model, layers)
    problem = _problem(layers, costs, tokens, choices, Estimates(measured), begun.slope)
    chosen = program.solve(problem, budget)
    contenders = _contenders(problem, layers, list(choices), chosen, budget)
    work.verify(contenders, reference)
    worth = begun.slope if start is None else work.gain(next(iter(contenders.values())))
    recipe = recipe_of(base, contenders[TUNED].assignment, choices, options.name)
    front = program.front(problem, Budget(wide_layers=options.wide_layers), "bytes")
    return Tuned(
        recipe, layers, list(choices), measured, costs, begun.slope, worth, tokens, front, contenders,
        time.perf_counter() - begin_s,
    )  # fmt: skip


def _check(config: TrainConfig) -> None:
    for key, refused, remedy in (
        ("parallel", config.parallel.ranks > 1, "set its sizes to 1"),
        ("switches", bool(config.switches), "set it to []"),
    ):
        if refused:
            raise ConfigError(f"{key}: expected one process and one recipe to tune with, found more: {remedy}")


@dataclass
class _Work:
    """What the stages share."""

    config: TrainConfig
    options: Options
    base: Recipe
    choices: Mapping[str, Choice]
    dataset: Dataset
    start: Weights | None
    on_progress: OnProgress

    def run(self, recipe: Recipe, what: str, seed: int, steps: int | None = None) -> tuple[ShortRun, Weights]:
        """One short run by a recipe. steps: None: as many as are asked for."""
        steps = self.options.steps if steps is None else steps
        text = f"training {steps} steps, {what}" if steps else f"reading held-out text, {what}"
        self.on_progress(Progress(text, 0, steps))
        return short_run(
            for_short_runs(self.config, steps, seed), self.dataset, recipe, self.start,
            lambda step, loss: self.on_progress(Progress(text, step, steps)),
        )  # fmt: skip

    def look(self) -> tuple[GPT, list[str], dict[tuple[str, str], Costs], int]:
        """(model to measure, layers, what they take, tokens of a micro-batch).

        Its parameters and gradients are in float32, so that nothing but the products is measured.
        """
        # what is recomputed is not kept, and could not be counted
        config = dataclasses.replace(self.config, activation_checkpointing=False)
        model = model_with(config, self.dataset, self.start)
        narrowest = min((c for c in self.choices.values() if not c.is_wide), key=lambda c: c.relative_time)
        layers = tunable(model, narrowest)
        plain = Recipe()
        # by a narrow choice, so that all of these layers are ours: float32 leaves layers as torch has them
        prepare(model, None, narrowest.recipe.replace(**{role: getattr(plain, role) for role in STATE_ROLES}))
        put(model, dict.fromkeys(layers, next(iter(self.choices))), self.choices)
        model.train()
        self._batches(self.options.probe_batch_size, self.options.batches)  # too little text is found at once
        (whole,) = self._batches(self.config.batch_size, 1)
        return model, layers, costs_of(model, layers, self.choices, whole), whole[0].numel()

    def measure(self, model: GPT, layers: Sequence[str]) -> Measured:
        """What each layer loses by each choice."""
        batches = self._batches(self.options.probe_batch_size, self.options.batches)
        text = f"measuring {len(layers)} layers x {len(self.choices) - 1} choices on {len(batches)} batches"
        return measure(
            model, layers, self.choices, batches, self.config.seed,
            lambda done, total: self.on_progress(Progress(text, done, total)),
        )  # fmt: skip

    def _batches(self, size: int, count: int) -> list[Batch]:
        context = self.config.model.build(self.dataset.tokenizer.vocab_size).context
        length = self.config.sequence_length or context
        stream = BatchStream(self.dataset.train, size, length, self.config.seed + _ORDER_SEED)
        if size * count > stream.sequences_per_epoch:
            raise ConfigError(
                f"{count} batches of {size} sequences: expected at most {stream.sequences_per_epoch} sequences, which "
                "is all of the training text: use more text, fewer batches, or shorter sequences"
            )
        device = self.config.torch_device()
        return [tuple(part.to(device) for part in stream.next()) for _ in range(count)]  # type: ignore[misc]

    def verify(self, contenders: Mapping[str, Contender], reference: ShortRun) -> None:
        """Give each contender its runs; the first of the wide one is `reference`, unless the weights moved since."""
        for number in range(self.options.seeds):
            seed = self.config.seed + number
            for name, contender in contenders.items():
                same = next(
                    (c for c in contenders.values() if c.assignment == contender.assignment and c.runs[number:]), None
                )
                if same is not None:
                    contender.runs.append(same.runs[number])
                elif number == 0 and all(self.choices[chosen].is_wide for chosen in contender.assignment.values()):
                    contender.runs.append(reference)
                else:
                    recipe = recipe_of(self.base, contender.assignment, self.choices, name)
                    what = name if self.options.seeds == 1 else f"{name}, seed {seed}"
                    contender.runs.append(self.run(recipe, what, seed)[0])

    def gain(self, reference: Contender) -> float:
        """Nats that a short run with all layers wide gains on held-out text, at least 0.

        A run that goes the share x less of its way loses x of its gain, and no more than that where it gains less and
        less: x times the gain is what it is expected to lose, where short runs go on from weights that have learnt.
        """
        if not self.options.steps:
            return 0.0
        before, _ = self.run(wide(self.base), "all layers wide", self.config.seed, steps=0)
        return max(before.held_out - reference.held_out, 0.0)


def _problem(
    layers: Sequence[str], costs: Mapping[tuple[str, str], Costs], tokens: int, choices: Mapping[str, Choice],
    estimates: Estimates | None = None, slope: float = 0.0,
) -> Problem:  # fmt: skip
    """Costs in nats, 0 before they are measured; bytes a token; time as a share of all layers wide."""
    names = list(choices)
    all_wide = sum(costs[layer, names[0]].time for layer in layers)

    def nats(layer: str, name: str) -> float:
        return 0.0 if estimates is None else estimates.cost(layer, name, slope).value

    return Problem(
        [[nats(layer, name) for name in names] for layer in layers],
        [[costs[layer, name].bytes / tokens for name in names] for layer in layers],
        [[costs[layer, name].time / all_wide for name in names] for layer in layers],
        names=names,
    )


def _budget(problem: Problem, layers: Sequence[str], options: Options) -> Budget:
    all_wide = program.point(problem, [problem.wide] * problem.layers)
    limit = options.bytes_per_token
    if options.bytes_share is not None:
        limit = options.bytes_share * all_wide.bytes
    if limit is None and options.time_share is None and options.wide_layers is None:
        limit = program.point(
            problem, _with_wide(problem, layers, ends(layers)[HAND_RULES.index(options.hand_rule)])
        ).bytes
    return Budget(limit, options.time_share, options.wide_layers)


def _with_wide(problem: Problem, layers: Sequence[str], names: Sequence[str]) -> list[int]:
    """These layers wide, all others by the narrowest choice."""
    narrowest = narrowest_of(problem)
    return [problem.wide if layer in names else narrowest for layer in layers]


def narrowest_of(problem: Problem) -> int:
    """The choice with the fewest bytes in all layers."""
    sums = [sum(row[at] for row in problem.bytes) for at in range(problem.choices)]
    return min((at for at in range(problem.choices) if at != problem.wide), key=sums.__getitem__)


def _contenders(
    problem: Problem, layers: Sequence[str], choices: Sequence[str], chosen: Point, budget: Budget
) -> dict[str, Contender]:
    """All wide, all narrowest, the hand rule with as many layers wide as the budget allows, and the tuned choice."""
    narrowest = narrowest_of(problem)
    hand, kept = [narrowest] * problem.layers, 0
    for count in range(1, problem.layers // 2 + 1):
        names = [*layers[:count], *layers[-count:]]
        wider = _with_wide(problem, layers, names)
        if not _within(program.point(problem, wider), len(names), budget):
            break
        hand, kept = wider, count
    shown = {HAND: _HAND_NAMES.get(kept, f"first and last {kept} layers wide")}
    found = {
        f"all {choices[0]}": [problem.wide] * problem.layers,
        f"all {choices[narrowest]}": [narrowest] * problem.layers,
        HAND: hand,
        TUNED: list(chosen.chosen),
    }
    contenders = {}
    for name, numbers in found.items():
        sums = program.point(problem, numbers)
        assignment: Assignment = {layer: choices[at] for layer, at in zip(layers, numbers, strict=True)}
        contenders[name] = Contender(shown.get(name, name), assignment, sums.loss, sums.bytes, sums.time)
    return contenders


def _within(sums: Point, wide_layers: int, budget: Budget) -> bool:
    slack = 1 + 1e-9  # as in `program`
    return (
        (budget.bytes is None or sums.bytes <= budget.bytes * slack)
        and (budget.time is None or sums.time <= budget.time * slack)
        and (budget.wide_layers is None or wide_layers <= budget.wide_layers)
    )

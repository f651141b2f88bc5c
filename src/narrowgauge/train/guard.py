"""The guard: watches what precision does to a run, widens what is in trouble, and narrows it again after calm.

See docs/guard.md. In a loop of your own:

    guard = Guard(model, optimizer, "fp8_delayed", GuardConfig(mode="act"))
    for step, batch in enumerate(batches, start=1):
        with guard.step(step):
            loss = model(batch)
            loss.backward()
            optimizer.step()
        for decision in guard.end(step, loss.item()):
            print(decision.message)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from narrowgauge.layers.convert import device_of
from narrowgauge.numerics.companding import LINEAR
from narrowgauge.optim.guard import StepGuard
from narrowgauge.optim.replace import inmost
from narrowgauge.recipes import library
from narrowgauge.recipes.serialize import spec_from_dict, spec_to_dict
from narrowgauge.recipes.spec import MOMENT_ROLES, Recipe
from narrowgauge.train.guard_apply import Moments, check_prepared, take_up_casts, widened
from narrowgauge.train.guard_decisions import Decision, of_cast, of_everything, of_loss
from narrowgauge.train.guard_ladder import Rung, is_last, next_wider
from narrowgauge.train.guard_limits import CALM_SHARE, Finding, Verdict, judge
from narrowgauge.train.guard_looks import Looks
from narrowgauge.train.guard_losses import Losses, Trouble
from narrowgauge.train.guard_samples import WOULD_FLUSH, Key, Layers, samples_of, without_operands, worst_over_ranks
from narrowgauge.train.guard_standing import Move, Standing
from narrowgauge.train.sections import GuardConfig

GoBack = Callable[[int], int | None]


class Guard:
    """Decides from sampled statistics and from every step's loss, the same on all ranks, and carries it out.

    model, optimizer: prepared by `recipe`, a name or a Recipe, perhaps with a schedule. go_back: called with the first
    step of trouble; takes model and optimizer back to a state before it, and returns that state's step, or None where
    it has none; None: the guard goes back nowhere. Everything else is undone by `mode="off"` only: then nothing is
    watched.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        recipe: str | Recipe,
        config: GuardConfig | None = None,
        *,
        go_back: GoBack | None = None,
    ) -> None:
        self.config = GuardConfig(mode="act") if config is None else config
        self.config.check()
        self._observation = Looks(self, model, optimizer)
        self._model = self._observation.model
        self._optimizer = inmost(optimizer)
        self._moments = Moments(self._optimizer, self._model)
        self._recipe = library.recipe(recipe).resolve(device_of(model))
        if self.config.mode != "off":
            check_prepared(self._model, self._recipe)
        self._go_back = go_back
        self._losses = Losses(self.config)
        self._everything = Standing()  # of all layers together, which losses alone move
        self._standings: dict[Key, Standing] = {}
        self._casts: dict[Key, Rung] = {}  # in force where they are not the recipe's
        self._amax: dict[Key, float] = {}
        self._phase = 0
        self._looks_again = False

    @property
    def is_acting(self) -> bool:
        """True where decisions are carried out."""
        return self.config.mode == "act"

    @property
    def rollbacks(self) -> int:
        """How often the run went back."""
        return self._losses.rollbacks

    @property
    def trouble_since(self) -> int:
        """The first step of losses in trouble that the run may yet go back for; 0: there are none."""
        return self._losses.unanswered_since if self.is_acting and self.rollbacks < self.config.rollbacks else 0

    @property
    def recipe(self) -> Recipe:
        """The plain recipe that the model runs by now, with what the guard has widened."""
        operands = {key: spec for key, spec in self._casts.items() if key[1] not in MOMENT_ROLES}
        return widened(self._recipe.phases[self._phase][1], operands, bool(self._everything.climbed))

    def due(self, step: int) -> bool:
        """True where `step` (from 1) is to be sampled: every so many, and where something needs a closer look."""
        if self.config.mode == "off":
            return False
        return self._looks_again or step % self.config.every == 0 or self._losses.asks_for(step)

    @property
    def weighs_moments(self) -> bool:
        """True where moments are judged by what storing them does: by its error, where some are narrow and not
        companded, or by first moments that become zero, where there is a limit for them.
        """
        limited = self.config.exp_avg.flushed < 1
        kept = ((role, self._moments.spec(p, role)) for _, p in self._moments.parameters() for role in MOMENT_ROLES)
        return any(
            spec is not None
            and spec.format.is_narrow
            and (spec.companding is LINEAR or (limited and role == "exp_avg"))
            for role, spec in kept
        )

    def step(self, step: int) -> AbstractContextManager[None]:
        """Around forward, backward and optimizer step: measures where the step is due."""
        return self._observation.step(step)

    def end(
        self, step: int, loss: float, *, skipped: bool = False, loss_scale: float = 1.0, layers: Layers | None = None
    ) -> list[Decision]:
        """Decide after a step, and carry it out.

        loss: the same on all ranks. skipped: the optimizer changed nothing, for a gradient that is not finite.
        loss_scale: where there is one; above 1 a skip with a finite loss is its search for a scale. layers: what the
        step measured, where it was due; left out: what `step` did.
        """
        if self.config.mode == "off":
            return []
        if layers is None:
            found = self._observation.read()
            layers = None if found is None else found.layers
        if self._follow_schedule(step) and layers is not None:
            layers = without_operands(layers)  # whose casts are no more in force
        casts, everything = dict(self._casts), bool(self._everything.climbed)
        decisions: list[Decision] = []
        trouble = self._losses.take(step, loss, skipped, loss_scale)
        if trouble is not None:
            decisions = self._answer(trouble)
            self._follow_schedule(step)  # perhaps back
        elif layers is not None:
            decisions = self._weigh(step, layers)
        if (casts, everything) != (self._casts, bool(self._everything.climbed)):
            self._carry_out(casts)
        return decisions

    # losses

    def _answer(self, trouble: Trouble) -> list[Decision]:
        """What follows from losses in trouble: all layers wider, and back to before it."""
        if not self.is_acting:
            return [of_loss(trouble, "warn", why="guard.mode is warn: it goes on as it is")]
        decisions = []
        base = self._recipe.phases[self._phase][1]
        if base.quantizes_gemms and not self._everything.climbed:
            self._everything.promoted(None)
            decisions.append(of_everything(trouble.step, "promote", base, trouble))
        restored, why = None, "no way back was given (go_back)"
        if self.rollbacks >= self.config.rollbacks:
            why = f"all rollbacks are used up (guard.rollbacks={self.config.rollbacks})"
        elif self._go_back is not None:
            restored, why = self._go_back(trouble.since), "there is no state before it to go back to"
        if restored is None:
            return [*decisions, of_loss(trouble, "warn", why=why)]
        self._losses.went_back(trouble)
        for label, p in self._moments.parameters():
            if (label, "exp_avg_sq") in self._casts:  # the state may be one of before the promotion
                self._moments.refill(p)
        return [*decisions, of_loss(trouble, "rollback", restored=restored)]

    # samples

    def _weigh(self, step: int, layers: Layers) -> list[Decision]:
        came_from = {key: each.climbed[-1] for key, each in self._standings.items() if each.climbed}
        samples = worst_over_ranks(samples_of(self._model, self._moments, layers, came_from, self.weighs_moments))
        self._amax |= {key: each.measures["amax"] for key, each in samples.items() if "amax" in each.measures}
        decisions = self._weigh_everything(step)
        findings: dict[Key, tuple[Rung, Finding]] = {}
        for key, (spec, measures) in samples.items():
            limits = getattr(self.config, key[1])
            finding = judge(key[1], spec, measures, limits)
            if finding is None:
                continue
            if measures.get(WOULD_FLUSH, 0.0) > limits.flushed * CALM_SHARE:  # no trial of what is known to fail
                finding = finding._replace(verdict=min(finding.verdict, Verdict.INSIDE, key=list(Verdict).index))
            findings[key] = spec, finding
        if not self._everything.climbed:
            for key in self._standings:  # what is not cast at all is calm
                if key in findings or key not in self._casts:
                    continue
                if key[1] in MOMENT_ROLES or self._casts[key] is None:  # else its layer has not run, or not finitely
                    findings[key] = self._casts[key], Finding(Verdict.CALM, "calm", 0.0, 0.0)
        for key in sorted(findings):
            decisions += self._weigh_one(step, key, *findings[key])
        self._looks_again = any(each.is_watched for each in (self._everything, *self._standings.values()))
        return decisions

    def _weigh_one(self, step: int, key: Key, spec: Rung, finding: Finding) -> list[Decision]:
        standing, config = self._standings.get(key, Standing()), self.config
        move = standing.take(finding.verdict, config.confirm, config.calm, step % config.every == 0)
        if move is not Move.NONE or standing.has_warned:
            self._standings[key] = standing
        if move is Move.NONE or (move is Move.DEMOTE and not self.is_acting):  # one that acted may have widened it
            return []
        if move is Move.WAIT:
            return [of_cast(step, "wait", key, finding, spec, spec)]
        if move is Move.DEMOTE:
            narrower = standing.demoted(config.confirm)
            self._casts[key] = narrower
            return [of_cast(step, "demote", key, finding, spec, narrower, standing.needed_calm(config.calm))]
        assert spec is not None and not is_last(key[1], spec)  # which have no limit
        wider = next_wider(key[1], spec, finding.measure)
        if not self.is_acting:
            standing.warned()
            return [of_cast(step, "warn", key, finding, spec, wider)]
        standing.promoted(spec)
        self._casts[key] = wider
        return [of_cast(step, "promote", key, finding, spec, wider)]

    def _weigh_everything(self, step: int) -> list[Decision]:
        """All layers narrow again, where losses have long been calm."""
        verdict = Verdict.CALM if self._losses.calm_since_sample() else Verdict.INSIDE
        if not self._everything.climbed and not self._everything.trial:
            return []
        config = self.config
        move = self._everything.take(verdict, config.confirm, config.calm, step % config.every == 0)
        if move is not Move.DEMOTE or not self.is_acting:
            return []
        self._everything.demoted(config.confirm)
        return [of_everything(step, "demote", self._recipe.phases[self._phase][1])]

    # carrying out

    def _carry_out(self, before: dict[Key, Rung]) -> None:
        take_up_casts(self._model, self.recipe, self._amax, at_step=True)
        for label, p in self._moments.parameters():
            for role in MOMENT_ROLES:
                spec = self._casts.get((label, role))
                if spec is not None and before.get((label, role)) != spec:
                    self._moments.keep(p, role, spec)
                    if role == "exp_avg_sq":
                        self._moments.refill(p)

    def _follow_schedule(self, step: int) -> bool:
        """Where the recipe's schedule is at another recipe, operands begin anew with what that says of them.

        True where it is. The schedule goes by the optimizer's count of steps, which a way back takes back, too.
        """
        count = StepGuard.on(self._optimizer)
        steps = step if count is None else count.steps
        phase = sum(begin <= steps for begin, _ in self._recipe.phases) - 1
        if phase == self._phase:
            return False
        self._phase = phase
        for known in (self._standings, self._casts):
            for key in [key for key in known if key[1] not in MOMENT_ROLES]:
                del known[key]
        if self._everything.climbed:
            take_up_casts(self._model, self.recipe, self._amax, at_step=True)
        return True

    # saving

    def state_dict(self) -> dict[str, Any]:
        """All that decisions depend on, of plain values that JSON holds: the same on all ranks."""
        return {
            "phase": self._phase,
            "looks_again": self._looks_again,
            "losses": self._losses.state_dict(),
            "everything": self._everything.state_dict(),
            "standings": [[*key, each.state_dict()] for key, each in sorted(self._standings.items())],
            "casts": [[*key, spec and spec_to_dict(spec)] for key, spec in sorted(self._casts.items())],
            "amax": [[*key, amax] for key, amax in sorted(self._amax.items())],
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on from what `state_dict` gave, and bring model and optimizer into the casts that were in force.

        Load model and optimizer before; and once more where this returns True: the state of their moments is then
        kept otherwise than it was when they were loaded.
        """
        self._phase, self._looks_again = state["phase"], state["looks_again"]
        self._losses.load_state_dict(state["losses"])
        self._everything = Standing.from_state(state["everything"])
        self._standings = {(layer, role): Standing.from_state(each) for layer, role, each in state["standings"]}
        self._casts = {(layer, role): spec and spec_from_dict(spec) for layer, role, spec in state["casts"]}
        self._amax = {(layer, role): amax for layer, role, amax in state["amax"]}
        if self._casts or self._everything.climbed:
            take_up_casts(self._model, self.recipe, {}, at_step=True)
        changed = False
        for label, p in self._moments.parameters():
            for role in MOMENT_ROLES:
                spec = self._casts.get((label, role))
                if spec is not None and self._moments.spec(p, role) != spec:
                    self._moments.keep(p, role, spec)
                    changed = True
        return changed

"""What precision does to a model in training, looked at every so many steps: by layer and role, changing no bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from narrowgauge.distributed.meeting_point import has_peers
from narrowgauge.layers.kinds import root_of
from narrowgauge.layers.statistics import Statistics, collect
from narrowgauge.numerics.tally import Figures
from narrowgauge.observe.state_statistics import StateStatistics, watched

Layers = dict[str, dict[str, dict[str, float]]]  # layer -> role -> measure -> value
Histograms = dict[str, dict[str, dict[str, Any]]]  # layer -> role -> {"low", "counts", "zeros"}
Found = dict[str, dict[str, Figures]]
HISTOGRAM_SAMPLES = 4  # a histogram at every so many samples, where nothing else is asked for


class Precision(NamedTuple):
    """What a sampled step showed. layers: {layer: {role: {measure: value}}}. histograms: None but on their steps.

    Roles and measures: see docs/journal.md. A measure is there only where it is known.
    """

    layers: Layers
    histograms: Histograms | None

    def rows(self) -> dict[str, dict[str, Any]]:
        """{kind: fields} of the rows that a journal has of it."""
        found: dict[str, dict[str, Any]] = {"precision": {"layers": self.layers}}
        return found if self.histograms is None else found | {"histograms": {"layers": self.histograms}}


class Observation:
    """Looks at every `every`-th step of a training loop; all other steps run as if it were not there.

        observation = narrowgauge.observe.Observation(model, optimizer, every=50)
        for step, batch in enumerate(batches, 1):
            with observation.step(step):
                ...  # forward, backward, optimizer.step()
            found = observation.read()  # None, but after a sampled step
            if found is not None:
                print(found.layers["blocks.0.mlp.up"]["input"]["sqnr_db"])

    model, optimizer: as `prepare` returned them, the model perhaps compiled since; without an optimizer the roles of
    its state are left out. every: steps between samples; 0: none. histograms_every: steps between samples that count
    exponents, too; None: at every fourth sample; 0: never. In a sampled step code of `torch.compile` runs as it was
    written. Several may look at once. Of a step that ends in an error nothing is told.

    Nothing that training reads is changed, and no random number is drawn: a run has the same bits with and without it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        every: int = 50,
        histograms_every: int | None = None,
    ) -> None:
        self.model, self.optimizer = root_of(model), optimizer
        self.every = every
        self.histograms_every = HISTOGRAM_SAMPLES * every if histograms_every is None else histograms_every
        self._stack: ExitStack | None = None
        self._looks: tuple[Statistics, StateStatistics | None] | None = None
        self._has_bins = False

    def due(self, step: int) -> bool:
        """Whether a step, counted from 1, is sampled."""
        return self.every > 0 and (step % self.every == 0 or self._bins_due(step))

    def _bins_due(self, step: int) -> bool:
        return self.every > 0 and self.histograms_every > 0 and step % self.histograms_every == 0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one step's forward, backward and optimizer step; looks where `due`."""
        if not self.due(step):
            yield
            return
        self.begin(step)
        try:
            yield
        except BaseException:
            self._looks = None  # of a part of a step nothing is told
            raise
        finally:
            self.end()

    def begin(self, step: int, *, has_state: bool = True) -> None:
        """Look from now on, whether the step is due or not; `end` ends it.

        has_state: whether at gradients, moments, parameters and collectives, too; operands alone take less time.
        """
        self.end()
        self._has_bins = self._bins_due(step)
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # else nothing can be compiled
                stack.enter_context(_EAGER)
            operands = stack.enter_context(collect(self.model, self._has_bins))
            state = stack.enter_context(watched(self.model, self.optimizer, self._has_bins)) if has_state else None
            self._looks = operands, state
            self._stack = stack.pop_all()

    def end(self) -> None:
        """Look no longer; a second call does nothing."""
        if self._stack is not None:
            self._stack.close()
            self._stack = None

    def read(self) -> Precision | None:
        """What the last sampled step showed, once; None where there is nothing new. Waits for the device.

        A collective in several processes: all of them call it after the same steps, and get the same.
        """
        looks, self._looks = self._looks, None
        if looks is None:
            return None
        operands, state = looks
        found = operands.figures()
        for layer, roles in ({} if state is None else state.figures()).items():
            found.setdefault(layer, {}).update(roles)
        found = _of_all_ranks(found)
        layers = {
            layer: {role: figures.measures() for role, figures in roles.items()} for layer, roles in found.items()
        }
        return Precision(layers, _histograms(found) if self._has_bins else None)


class _Eager:
    """Compiled code runs as it was written until the last one that looks has ended, in whatever order they do."""

    def __init__(self) -> None:
        self._looking = 0
        self._stance = ExitStack()

    def __enter__(self) -> None:
        if self._looking == 0:
            self._stance.enter_context(torch.compiler.set_stance("force_eager"))
        self._looking += 1

    def __exit__(self, *error: object) -> None:
        self._looking -= 1
        if self._looking == 0:
            self._stance.close()


_EAGER = _Eager()  # torch has one stance for the whole process


def _histograms(found: Found) -> Histograms:
    histograms: Histograms = {}
    for layer, roles in found.items():
        counted = {role: h for role, figures in roles.items() if (h := figures.histogram()) is not None}
        if counted:
            histograms[layer] = counted
    return histograms


def _of_all_ranks(found: Found) -> Found:
    """The figures of all processes together: those of a layer that several have parts of, or run, are merged."""
    if not has_peers():
        return found
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    merged: Found = {}
    for each in everyone:
        for layer, roles in each.items():
            mine = merged.setdefault(layer, {})
            for role, figures in roles.items():
                mine[role] = mine[role].merged(figures) if role in mine else figures
    return merged

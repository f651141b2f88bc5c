"""Gradients averaged over data-parallel processes while backward runs, by the recipe's `grad_comm`.

A gradient leaves its parameter as soon as it is accumulated: encoded into a bucket, which travels as soon as it is
full and those before it are on their way, so that every rank communicates in the same order. The mean of a parameter
comes back as codes and becomes `p.grad` in the recipe's `grad` format. No bucket is kept from step to step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.distributed import codec, wire_watch
from narrowgauge.distributed.buckets import Bucket, bucket_values, plan
from narrowgauge.distributed.collectives import Group
from narrowgauge.distributed.reduction import Reduction, Row, cast_values, wide_values
from narrowgauge.errors import ConversionError, NarrowgaugeError
from narrowgauge.layers.gradient_hooks import KeptGradient, is_cast
from narrowgauge.layers.gradients import trainable
from narrowgauge.recipes.spec import CastSpec, Recipe
from narrowgauge.tensors.local import local, local_grad


class Plan(NamedTuple):
    """ids, sizes: of the trainable parameters, in the order in which gradients are expected. places: of each, the
    (number of a bucket, place in it) of its pieces, in order."""

    ids: tuple[int, ...]
    sizes: tuple[int, ...]
    buckets: list[Bucket]
    places: list[list[tuple[int, int]]]


class GradientReducer:
    """The sink of a model's gradients: their mean over `group` comes back. See `layers.gradient_hooks.Sink`.

    Hooks hold it, so it holds neither the model nor parameters beyond a backward. weight: by what this rank's gradients
    are multiplied first, 0-dimensional float32, see `share_of_batch`; None: not at all. rounds: reductions so far.
    """

    sets_aside = True
    in_parameter_dtype = False

    def __init__(self, model: nn.Module, recipe: Recipe, group: Group) -> None:
        self._model = weakref.ref(model)
        self._recipe = recipe
        self.group = group
        self.weight: Tensor | None = None
        self.leaves_out = False  # this rank has no samples: whatever gradients it has count for nothing
        self.rounds = 0
        self._plan: Plan | None = None
        self._round: Round | None = None
        self._callback: Callable[[], object] | None = None  # a weak reference to what backward calls at its end

    def begin(self) -> None:
        """An `accumulate` context begins."""
        self._round = None  # of one that has failed

    @torch.no_grad()
    def take(self, p: nn.Parameter) -> None:
        """Take `p.grad`, encode it, and start what can travel."""
        if p.grad is None:
            return
        under_way = self._current()
        index = under_way.index.get(id(p))
        if index is None:  # a parameter without elements
            return
        grad = _checked(p, lambda: self._name(p))
        p.grad = None
        if self.leaves_out:
            return
        if index in under_way.arrived:
            raise NarrowgaugeError(
                f"parameter '{self._name(p)}' got a second gradient within one backward, after the first had left for "
                "the other ranks: checkpoint activations with use_reentrant=False, or put the backward call into "
                "`with narrowgauge.accumulate(model):`"
            )
        under_way.put(index, grad.reshape(-1), self.weight)

    @torch.no_grad()
    def finish(self, completes: bool = True) -> None:
        """Let everything travel that has not yet, zeros for gradients that this rank does not have; then all is there.

        completes: False where an error has ended an `accumulate` context: then nothing travels.
        """
        if not completes:
            return
        under_way = self._round or self._begun()
        self._round = None
        under_way.finish()
        self.rounds += 1

    def _current(self) -> Round:
        """The round under way, or a new one that ends with the backward under way."""
        in_backward = torch._C._current_graph_task_id() != -1
        if self._round is not None and in_backward:
            # where a backward fails, torch drops what was to be called at its end
            if self._callback is None or self._callback() is None:
                self._round = None
        if self._round is None:
            self._round = self._begun()
            self._callback = self._queued() if in_backward else None
        return self._round

    def _queued(self) -> Callable[[], object]:
        def at_end() -> None:
            self.finish()

        torch.autograd.Variable._execution_engine.queue_callback(at_end)  # type: ignore[attr-defined]
        return weakref.ref(at_end)

    def _begun(self) -> Round:
        model = self._model()
        assert model is not None
        parameters = list(reversed(trainable(model)))
        if self._plan is None or self._plan.ids != tuple(map(id, parameters)):
            self._plan = self._planned(parameters)
        return Round(self._plan, parameters, self.group)

    def _planned(self, parameters: list[nn.Parameter]) -> Plan:
        specs = [self.travels_as(p) for p in parameters]
        sizes = tuple(local(p).numel() for p in parameters)
        buckets = plan(sizes, specs, dist.get_world_size(self.group), bucket_values(sum(sizes)))
        places: list[list[tuple[int, int]]] = [[] for _ in sizes]
        for number, bucket in enumerate(buckets):
            for place, piece in enumerate(bucket.pieces):
                places[piece.parameter].append((number, place))
        return Plan(tuple(map(id, parameters)), sizes, buckets, places)

    def travels_as(self, p: nn.Parameter) -> CastSpec:
        """By `grad_comm`; what the recipe leaves wide travels as it is stored."""
        owner = KeptGradient.of(p)
        if owner is None or owner.sink is not self:
            raise ConversionError(
                f"parameter '{self._name(p)}' has begun to require gradients since the model was prepared, and would "
                "not be averaged over ranks: call narrowgauge.prepare again"
            )
        stays = p.numel() < self._recipe.min_state_size or (is_cast(self._recipe.grad) and not owner.is_cast)
        return owner.spec if stays else codec.spec_of(self._recipe, "grad_comm")

    def _name(self, p: nn.Parameter) -> str:
        model = self._model()
        assert model is not None
        return next((name for name, other in model.named_parameters() if other is p), "of no name")


class Round:
    """The reduction of one backward, or of what an `accumulate` context has summed.

    index: number of each parameter that has elements, by id. arrived: numbers of those whose gradients this rank put.
    """

    def __init__(self, plan: Plan, parameters: list[nn.Parameter], group: Group) -> None:
        self._plan = plan
        self._parameters = parameters
        self._group = group
        self.index = {id(p): i for i, p in enumerate(parameters) if plan.sizes[i]}
        self.arrived: set[int] = set()
        self._reductions: list[Reduction | None] = [None] * len(plan.buckets)
        self._launched = 0
        self._rows: dict[int, list[Row]] = {}

    def put(self, index: int, values: Tensor, weight: Tensor | None) -> None:
        """Enter a gradient, flat, piece by piece: what fills a bucket makes room before the next is begun."""
        self.arrived.add(index)
        for number, place in self._plan.places[index]:
            piece = self._plan.buckets[number].pieces[place]
            part = values[piece.start : piece.stop]
            wire_watch.sends(self._parameters[index])  # what was launched meanwhile has changed it
            self._reduction(number).put(place, part if weight is None else part.float() * weight)
            self._launch_full()

    def finish(self) -> None:
        """Launch the rest, and wait for all."""
        count = len(self._reductions)
        while self._launched < count:
            self._launch()
        if count:
            self._gather(count - 1)
        for number in range(max(count - 2, 0), count):
            self._collect(number)

    def _reduction(self, number: int) -> Reduction:
        found = self._reductions[number]
        if found is None:
            bucket = self._plan.buckets[number]
            device = local(self._parameters[bucket.pieces[0].parameter]).device
            found = self._reductions[number] = Reduction(bucket, self._group, device)
        return found

    def _launch_full(self) -> None:
        while self._launched < len(self._reductions):
            following = self._reductions[self._launched]
            if following is None or not following.is_full:
                return
            self._launch()

    def _launch(self) -> None:
        """Start the next bucket, and take those before it one step further each: at most three are in memory."""
        number = self._launched
        self._reduction(number).launch()
        self._launched += 1
        if number >= 1:
            self._gather(number - 1)
        if number >= 2:
            self._collect(number - 2)

    def _gather(self, number: int) -> None:
        self._reduction(number).gather()

    def _collect(self, number: int) -> None:
        """Take the means of a bucket; a parameter whose last piece is among them gets its gradient."""
        reduction = self._reduction(number)
        self._reductions[number] = None
        for place, rows in enumerate(reduction.finish()):
            piece = reduction.bucket.pieces[place]
            if reduction.is_used(place):
                self._rows.setdefault(piece.parameter, []).extend(rows)
            if piece.stop == self._plan.sizes[piece.parameter]:
                self._settle(piece.parameter, reduction.bucket.spec)

    def _settle(self, index: int, sent: CastSpec) -> None:
        p, rows = self._parameters[index], self._rows.pop(index, None)
        owner = KeptGradient.of(p)
        assert owner is not None
        if rows is None:
            owner.no_mean(p)
            return
        shape, dtype = local(p).shape, p.grad_dtype or p.dtype
        if owner.is_cast and not owner.has_mean(p):
            mean = cast_values(rows, sent, shape, dtype, owner.spec)
            if owner.tallies:
                owner.count(wide_values(rows, sent, shape, dtype), mean)
            owner.take_mean(p, mean)
        else:
            owner.take_mean(p, wide_values(rows, sent, shape, dtype))
        for hook in list((p._post_accumulate_grad_hooks or {}).values()):  # type: ignore[attr-defined]
            if getattr(hook, "runs_on_means", False):
                hook(p)


def _checked(p: nn.Parameter, name: Callable[[], str]) -> Tensor:
    """The local part of a gradient that can be encoded. Raises NarrowgaugeError for others."""
    grad = local_grad(p)
    assert grad is not None
    if grad.requires_grad:
        raise NarrowgaugeError(
            f"the gradient of '{name()}' is a part of a graph, and ranks exchange numbers: call backward without "
            "create_graph, or torch.autograd.grad for derivatives of derivatives"
        )
    if grad.layout is not torch.strided:
        raise NarrowgaugeError(
            f"the gradient of '{name()}' has layout {grad.layout}: expected a dense one; build the embedding with "
            "sparse=False"
        )
    return grad

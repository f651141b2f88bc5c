"""What a sampled step did to gradients, optimizer state, parameters and what was sent, by layer and role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.layers.gradient_hooks import KeptGradient
from narrowgauge.numerics.tally import Figures, Tally
from narrowgauge.observe.run_header import layer_of
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.guard import parameters_of
from narrowgauge.optim.replace import inmost
from narrowgauge.optim.watch import GRAD, UpdateWatch
from narrowgauge.tensors.local import local_grad

COLLECTIVE = "collective"


class StateStatistics:
    """Tallies gathered inside `watched`. casts: of gradients, by name of the parameter. sent: of what travelled."""

    def __init__(
        self,
        names: dict[Tensor, str],
        updates: UpdateWatch,
        casts: dict[str, Tally],
        sent: Mapping[Tensor | str, Tally],
    ) -> None:
        self._names, self._updates, self._casts, self._sent = names, updates, casts, sent

    def figures(self) -> dict[str, dict[str, Figures]]:
        """{layer: {role: figures}}; waits for the device. Roles: grad, exp_avg, exp_avg_sq, param, collective."""
        found: dict[str, dict[str, Figures]] = {}
        for p, tallies in self._updates.tallies.items():
            if p in self._names:
                roles = {role: tally.read() for role, tally in tallies.items()}
                found.setdefault(layer_of(self._names[p]), {}).update(roles)
        for name, tally in self._casts.items():
            if tally.sums:
                roles = found.setdefault(layer_of(name), {})
                roles[GRAD] = _cast_and_kept(tally.read(), roles.get(GRAD))
        for place, tally in self._sent.items():
            name = place if isinstance(place, str) else layer_of(self._names.get(place, "of no name"))
            figures, roles = tally.read(), found.setdefault(name, {})
            roles[COLLECTIVE] = roles[COLLECTIVE].merged(figures) if COLLECTIVE in roles else figures
        return found


def _cast_and_kept(cast: Figures, kept: Figures | None) -> Figures:
    """The figures of a gradient's cast; what the step then found in it adds the share of zeros only: it is clipped."""
    if kept is None:
        return cast
    return Figures({**kept.sums, **cast.sums}, {**kept.maxima, **cast.maxima}, cast.bins, cast.zeros)


@contextmanager
def watched(model: nn.Module, optimizer: Optimizer | None, has_bins: bool = False) -> Iterator[StateStatistics]:
    """Look at the casts of gradients, and at the optimizer's step, inside; several may look at once.

    Of torch's own optimizers, whose state is float32, the gradients are looked at that they read.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    owners = {name: owner for p, name in names.items() if (owner := KeptGradient.of(p)) is not None}
    casts = {name: Tally(has_bins) for name in owners}
    inner = inmost(optimizer)
    updates = UpdateWatch(has_bins)
    handle: Any = None
    try:
        for name, owner in owners.items():
            owner.tallies = (*owner.tallies, casts[name])
        if isinstance(inner, LowPrecisionOptimizer):
            inner.watches = (*inner.watches, updates)
        elif inner is not None:
            handle = inner.register_step_pre_hook(lambda *_: _see_gradients(inner, updates))
        with _wire(has_bins) as sent:
            yield StateStatistics(names, updates, casts, sent)
    finally:
        for name, owner in owners.items():
            owner.tallies = tuple(each for each in owner.tallies if each is not casts[name])
        if handle is not None:
            handle.remove()
        if isinstance(inner, LowPrecisionOptimizer):
            inner.watches = tuple(each for each in inner.watches if each is not updates)


@contextmanager
def _wire(has_bins: bool) -> Iterator[Mapping[Tensor | str, Tally]]:
    """Tallies of what this process sends inside; none where there is no other process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        yield {}
        return
    from narrowgauge.distributed.wire_watch import watching  # loads much of torch.distributed

    with watching(has_bins) as watch:
        yield watch.tallies


@torch.no_grad()
def _see_gradients(optimizer: Optimizer, updates: UpdateWatch) -> None:
    # torch's own loss scaler leaves it to a fused step to divide by the scale
    loss_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    for p in parameters_of(optimizer):
        grad = local_grad(p) if p.grad is not None else None
        if grad is not None and not grad.is_sparse and grad.is_floating_point():
            updates.see_gradient(p, grad if loss_scale is None else grad / loss_scale.to(grad.device))

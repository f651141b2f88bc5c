"""What layers cast: the operands of every product, recorded as they are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from narrowgauge.layers.delayed import DelayedState
from narrowgauge.ops.operands import Cast, Caster
from narrowgauge.recipes.spec import CastSpec


class Recorded(NamedTuple):
    """One cast: of which layer, by its name, and operand."""

    layer: str
    role: str
    spec: CastSpec
    cast: Cast


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Recorded]]:
    """The casts of the layers of `model`, in the order in which they are made; codes are kept of all."""
    names = {id(module): name for name, module in model.named_modules()}
    calls: list[tuple[Any, str]] = []  # the slots that a call has for itself, and whose they are
    found: list[Recorded] = []
    slots, cast = DelayedState.delayed_slots, Caster.cast

    def delayed_slots(layer: DelayedState) -> Any:
        mine = slots(layer)
        calls.append((mine, names[id(layer)]))
        return mine

    def cast_one(self: Caster, role: str, x: Tensor, how: Any, **options: Any) -> Cast:
        done = cast(self, role, x, how, **{**options, "keep_codes": True})
        name = next(name for mine, name in calls if mine is self.delayed)
        found.append(Recorded(name, role, how.spec, done))
        return done

    with patch.object(DelayedState, "delayed_slots", delayed_slots), patch.object(Caster, "cast", cast_one):
        yield found


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """True for two tensors of the same shape, dtype and bytes, and for two times None."""
    if a is None or b is None:
        return a is b
    as_bytes = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return a.shape == b.shape and a.dtype is b.dtype and torch.equal(*as_bytes)

"""Optimizer state on the host: parameters and gradients visit it for the step (ZeRO-Offload, arXiv:2101.06840).

While one parameter is stepped by the CPU kernels, the next is on its way to the host and the one before on its way
back, on a stream of its own where the device has streams. On a machine without such a device the same code copies from
the CPU to the CPU, and the step is bitwise that of an optimizer whose state was never moved.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.optim.update import Item
from narrowgauge.tensors.quantized import QuantizedTensor

HOST = torch.device("cpu")
IN_FLIGHT = 2  # parameters on their way to the host while another is stepped


class _Visit(NamedTuple):
    """item: as it is on the device. on_host: the same with copies of parameter and gradient. arrived: when they are."""

    item: Item
    on_host: Item
    arrived: torch.Event | None


def check(offload: str | None) -> None:
    """Raise NarrowgaugeError for a place that state cannot be kept in."""
    if offload not in (None, "cpu"):
        raise NarrowgaugeError(f"offload={offload!r}: expected 'cpu', or None for state beside its parameter")


def step(items: Sequence[Item], update: Callable[[Item], None]) -> None:
    """Let `update` step every item on the host, and bring the parameters back."""
    devices = {item.param.device for item in items if item.param.is_cuda}
    streams = {device: torch.cuda.Stream(device) for device in devices}
    for device, stream in streams.items():
        stream.wait_stream(torch.cuda.current_stream(device))  # the gradients are there
    waiting = iter(items)
    on_the_way: deque[_Visit] = deque()
    while True:
        while len(on_the_way) < IN_FLIGHT and (item := next(waiting, None)) is not None:
            on_the_way.append(_fetch(item, streams.get(item.param.device)))
        if not on_the_way:
            break
        visit = on_the_way.popleft()
        if visit.arrived is not None:
            visit.arrived.synchronize()
        update(visit.on_host)
        with _on(streams.get(visit.item.param.device)):
            visit.item.param.detach().copy_(visit.on_host.param, non_blocking=True)
    for device, stream in streams.items():
        torch.cuda.current_stream(device).wait_stream(stream)


def _fetch(item: Item, stream: torch.cuda.Stream | None) -> _Visit:
    with _on(stream):
        on_host = item._replace(param=copy_on_host(item.param), grad=copy_on_host(item.grad))
        arrived = None if stream is None else stream.record_event()
    return _Visit(item, on_host, arrived)


def copy_on_host(x: Tensor) -> Tensor:
    """A copy of `x` on the host: pinned, and perhaps still on its way, where it comes from a GPU."""
    x = x.detach()
    if isinstance(x, QuantizedTensor):
        codes, scale, amax = map(copy_on_host, (x.codes, x.dequant_scale, x.amax))
        return QuantizedTensor(codes, scale, x.spec, x.dtype, amax)
    host = torch.empty_like(x, device=HOST, pin_memory=x.is_cuda)
    return host.copy_(x, non_blocking=True)


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

"""An optimizer's state in any format: made, read, and brought into other formats.

Of a distributed parameter it is that of the part which this process holds, in plain local tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from narrowgauge.numerics.scaling import ULP
from narrowgauge.optim import offload as offloading
from narrowgauge.optim import storage
from narrowgauge.optim.formats import StateFormats
from narrowgauge.optim.parameters import FormattedOptimizer
from narrowgauge.optim.randomness import SharedSeed
from narrowgauge.optim.update import Item, is_residual, read, write_parameter
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors.local import as_part_of, local
from narrowgauge.tensors.quantized import QuantizedTensor

MASTER = "master"
COPY = "copy"  # of a parameter that holds for all ranks what has travelled: its own digits, where it is stepped

PIECE = 1 << 20  # values: float32 copies of a whole embedding table are larger than what is made of it


class _Written(NamedTuple):
    """What a parameter was when the optimizer last wrote it: a later write by others shows."""

    version: tuple[int, int]  # a DTensor counts its own, apart from its local part's
    checksum: int | None  # of a parameter beside a copy of it: writes to `.data` do not count versions


class Partition(Protocol):
    """Which of an optimizer's whole parameters this process steps, the others being stepped elsewhere."""

    def owns(self, p: Tensor) -> bool:
        """True where this process has the state of `p`, and steps it."""
        ...

    def needs_copy(self, p: Tensor) -> bool:
        """True where less of `p` travels than it holds, so that its owner keeps a copy of all digits."""
        ...

    def hand_over(self, old: Tensor, new: Tensor) -> None:
        """Let `new`, which is to replace `old`, be of the same process."""
        ...

    def exchange(self, optimizer: Any) -> None:
        """After a step: bring what was stepped to all processes."""
        ...


class LowPrecisionState(FormattedOptimizer):
    """The state of a `LowPrecisionOptimizer`, which says what it is.

    partition: set by `prepare` where whole parameters are parted over processes; None: all are this one's.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        formats: StateFormats | None = None,
        *,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        generator: torch.Generator | None = None,
        offload: str | None = None,
        may_lose_updates: bool = False,
    ) -> None:
        offloading.check(offload)
        self.offload = offload
        self.generator = generator
        self.partition: Partition | None = None
        self.shared_seed: SharedSeed | None = None
        super().__init__(params, defaults, formats, overrides, may_lose_updates)

    def _forget_all(self) -> None:
        super()._forget_all()
        self._written: dict[Tensor, _Written] = {}
        self._kept: dict[Tensor, StateFormats] = {}  # the formats that the state is in

    def _formats_changed(self, params: Iterable[Tensor]) -> None:
        for p in params:
            if self.state.get(p):
                self._state_of(p)

    def hand_over(self, old: Tensor, new: Tensor) -> None:
        """Let `new`, which is to replace `old` in the groups, have its name and overrides. Old state is dropped."""
        super().hand_over(old, new)
        self.state.pop(old, None)
        if self.partition is not None:
            self.partition.hand_over(old, new)
        for cache in (self._written, self._kept):
            cache.pop(old, None)

    # values

    @torch.no_grad()
    def full_values(self, p: Tensor) -> Tensor:
        """All digits of a parameter: float32 (float64 for float64), of p's shape, from it and its master. A copy.

        Of a DTensor they are a DTensor, laid out as it is. Where whole parameters are parted over processes, those that
        this one does not step are as they have travelled.
        """
        state = self.state.get(p, {})
        self._take_up(p, state)
        held, master = self.held(p), state.get(MASTER)
        values = read(held, None if master is None else master.to(p.device))
        values = values.clone() if any(_shares_memory(values, each) for each in (held, master)) else values
        return as_part_of(p, values)

    @torch.no_grad()
    def set_values(self, p: Tensor, values: Tensor) -> None:
        """Write `values` (floating, of p's shape or of its local part's) into a parameter and its master.

        The moments stay. A bfloat16 parameter without a master takes the nearest ones.
        """
        if self.is_own(p):
            self._write(p, self._state_of(p), values)
            return
        held, values, spec = local(p), local(values), self._master_spec(p)
        if spec is not None and spec.scale is not ULP:  # its owner's is rounded from a master
            values = storage.decode(storage.encode(values, spec), held.shape)
        held.copy_(values)

    def is_own(self, p: Tensor) -> bool:
        """True where this process steps `p` and keeps its state."""
        return self.partition is None or self.partition.owns(p)

    def held(self, p: Tensor) -> Tensor:
        """What a step of `p` reads and writes: its local part, or the copy that its owner keeps."""
        copy = self.state[p].get(COPY) if p in self.state else None
        return local(p) if copy is None else copy

    def _write(self, p: Tensor, state: dict[str, Any], values: Tensor) -> None:
        held = self.held(p)
        values = local(values).to(self._home_of(p), storage.wide_dtype(held))
        param = held if self.offload is None else offloading.copy_on_host(held)
        for part, master, new in _pieces(param, state.get(MASTER), values):
            item = Item(part, master, part, (), None, False, 0)  # type: ignore[arg-type]
            write_parameter(item, torch.full_like(new, torch.nan), new, None)
        if param is not held:
            held.copy_(param)
        if COPY in state:
            local(p).copy_(held)
        self.mark_written(p)

    # making state

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        """The state in the formats that hold now; moments are made by the first step that needs them."""
        state, formats = self.state[p], self.formats_of(p)
        if not state:
            state["step"] = 0
            if self.partition is not None and self.partition.needs_copy(p):
                state[COPY] = local(p).detach().clone()
            self._make_master(p, read(self.held(p), None))
        elif self._kept.get(p) is not formats:
            self._reformat(p, state)
        self._kept[p] = formats
        self._take_up(p, state)
        return state

    def _moments_of(self, p: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> tuple[Tensor, ...]:
        names = self.moment_names(group)
        for name in names:
            if state.get(name) is None:
                spec = self._moment_spec(p, name)
                held = local(p)
                state[name] = storage.zeros(held.shape, spec, storage.wide_dtype(held), self._home_of(p))
        return tuple(state[name] for name in names)

    def _home_of(self, p: Tensor) -> torch.device:
        return p.device if self.offload is None else offloading.HOST

    def _moment_spec(self, p: Tensor, name: str) -> CastSpec:
        # by the size of the whole, so that its parts are kept as the whole would be
        return self.formats_of(p).of_moment(self.moments[name], p.numel())

    def _master_spec(self, p: Tensor) -> CastSpec | None:
        """What the formats say of a master, where the parameter is one that takes it."""
        spec, held = self.formats_of(p).master, self.held(p)
        quantized = isinstance(held, QuantizedTensor)
        if spec is None or (spec.scale is ULP and (quantized or held.dtype is not torch.bfloat16)):
            return None
        return spec if quantized or held.dtype in (torch.bfloat16, torch.float16) else None

    def _make_master(self, p: Tensor, values: Tensor) -> None:
        """A master of `values`, which are the parameter's."""
        spec = self._master_spec(p)
        if spec is not None and spec.scale is ULP:
            self.state[p][MASTER] = torch.zeros(values.shape, dtype=spec.format.dtype, device=self._home_of(p))
        elif spec is not None:
            self.state[p][MASTER] = storage.encode(values.to(self._home_of(p)), spec)
        self.mark_written(p)

    def _reformat(self, p: Tensor, state: dict[str, Any]) -> None:
        """Bring the state that there is into the formats that hold now."""
        for name in self.moments:
            if state.get(name) is not None and storage.spec_of(state[name]) != self._moment_spec(p, name):
                state[name] = storage.encode(storage.decode(state[name], local(p).shape), self._moment_spec(p, name))
        kept = None if MASTER not in state else storage.spec_of(state[MASTER])
        if kept != self._master_spec(p):
            values = local(self.full_values(p))
            state.pop(MASTER, None)
            self._make_master(p, values)
            self._write(p, state, values)

    def _take_up(self, p: Tensor, state: Mapping[str, Any]) -> None:
        """Where others wrote the parameter since it was last seen: what completed the old value is gone."""
        master, copy, written = state.get(MASTER), state.get(COPY), self._written.get(p)
        if written is None or (master is None and copy is None):
            return
        if written.version == _version(p) and written.checksum in (None, storage.checksum(local(p))):
            return
        if copy is not None:
            copy.copy_(local(p))
        if master is not None and is_residual(master):
            master.zero_()
        elif master is not None:
            storage.overwrite(master, read(self.held(p), None).to(master.device))
        self.mark_written(p)

    def mark_written(self, p: Tensor) -> None:
        """Remember the parameter as the optimizer left it."""
        state = self.state[p]
        master = state.get(MASTER)
        if master is not None or COPY in state:
            is_copied = COPY in state or (master is not None and not is_residual(master))
            self._written[p] = _Written(_version(p), storage.checksum(local(p)) if is_copied else None)


def _version(p: Tensor) -> tuple[int, int]:
    held = local(p)
    return (p._version, 0 if held is p else held._version)


def _shares_memory(values: Tensor, held: Tensor | None) -> bool:
    return type(held) in (Tensor, torch.nn.Parameter) and held.data_ptr() == values.data_ptr()  # type: ignore[union-attr]


def _pieces(param: Tensor, master: Tensor | None, values: Tensor) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Parameter, residual and values piece by piece; whole where they have no residual, or other strides."""
    param = param.detach()
    if master is None or not is_residual(master) or not (param.is_contiguous() and master.is_contiguous()):
        yield param, master, values
        return
    for start in range(0, param.numel(), PIECE):
        piece = slice(start, start + PIECE)
        yield param.view(-1)[piece], master.view(-1)[piece], values.reshape(-1)[piece]

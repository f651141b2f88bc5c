"""An optimizer's state in any format: made, read, brought into other formats, saved and loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.errors import CheckpointError
from narrowgauge.numerics.scaling import ULP
from narrowgauge.optim import offload as offloading
from narrowgauge.optim import storage
from narrowgauge.optim.formats import StateFormats
from narrowgauge.optim.overrides import ATTRIBUTE, overrides_of
from narrowgauge.optim.parameters import FormattedOptimizer
from narrowgauge.optim.update import Item, is_residual, read, write_parameter
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors.quantized import QuantizedTensor

MASTER = "master"
_GIVEN = "_given"


PIECE = 1 << 20  # values: float32 copies of a whole embedding table are larger than what is made of it


class _Written(NamedTuple):
    """What a parameter was when the optimizer last wrote it: a later write by others shows."""

    version: int
    checksum: int | None  # of a parameter beside a copy: writes to `.data` do not count versions


class LowPrecisionState(FormattedOptimizer):
    """The state of a `LowPrecisionOptimizer`, which says what it is."""

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
        for cache in (self._written, self._kept):
            cache.pop(old, None)

    # values

    @torch.no_grad()
    def full_values(self, p: Tensor) -> Tensor:
        """All digits of a parameter: float32 (float64 for float64), of p's shape, from it and its master. A copy."""
        state = self.state.get(p, {})
        self._take_up(p, state)
        master = state.get(MASTER)
        values = read(p, None if master is None else master.to(p.device))
        return values.clone() if any(_shares_memory(values, held) for held in (p, master)) else values

    @torch.no_grad()
    def set_values(self, p: Tensor, values: Tensor) -> None:
        """Write `values` (floating, of p's shape) into a parameter and its master. The moments stay.

        A bfloat16 parameter without a master takes the nearest ones.
        """
        self._write(p, self._state_of(p), values)

    def _write(self, p: Tensor, state: dict[str, Any], values: Tensor) -> None:
        values = values.to(self._home_of(p), storage.wide_dtype(p))
        param = p if self.offload is None else offloading.copy_on_host(p)
        for part, master, new in _pieces(param, state.get(MASTER), values):
            item = Item(part, master, part, (), None, False, 0)  # type: ignore[arg-type]
            write_parameter(item, torch.full_like(new, torch.nan), new, None)
        if param is not p:
            p.copy_(param)
        self._mark(p)

    # making state

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        """The state in the formats that hold now; moments are made by the first step that needs them."""
        state, formats = self.state[p], self.formats_of(p)
        if not state:
            state["step"] = 0
            self._make_master(p, read(p, None))
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
                state[name] = storage.zeros(p.shape, spec, storage.wide_dtype(p), self._home_of(p))
        return tuple(state[name] for name in names)

    def _home_of(self, p: Tensor) -> torch.device:
        return p.device if self.offload is None else offloading.HOST

    def _moment_spec(self, p: Tensor, name: str) -> CastSpec:
        return self.formats_of(p).of_moment(self.moments[name], p.numel())

    def _master_spec(self, p: Tensor) -> CastSpec | None:
        """What the formats say of a master, where the parameter is one that takes it."""
        spec, quantized = self.formats_of(p).master, isinstance(p.data, QuantizedTensor)
        if spec is None or (spec.scale is ULP and (quantized or p.dtype is not torch.bfloat16)):
            return None
        return spec if quantized or p.dtype in (torch.bfloat16, torch.float16) else None

    def _make_master(self, p: Tensor, values: Tensor) -> None:
        """A master of `values`, which are the parameter's."""
        spec = self._master_spec(p)
        if spec is None:
            return
        if spec.scale is ULP:
            self.state[p][MASTER] = torch.zeros(p.shape, dtype=spec.format.dtype, device=self._home_of(p))
        else:
            self.state[p][MASTER] = storage.encode(values.to(self._home_of(p)), spec)
        self._mark(p)

    def _reformat(self, p: Tensor, state: dict[str, Any]) -> None:
        """Bring the state that there is into the formats that hold now."""
        for name in self.moments:
            if state.get(name) is not None and storage.spec_of(state[name]) != self._moment_spec(p, name):
                state[name] = storage.encode(storage.decode(state[name], p.shape), self._moment_spec(p, name))
        kept = None if MASTER not in state else storage.spec_of(state[MASTER])
        if kept != self._master_spec(p):
            values = self.full_values(p)
            state.pop(MASTER, None)
            self._make_master(p, values)
            self._write(p, state, values)

    def _take_up(self, p: Tensor, state: Mapping[str, Any]) -> None:
        """Where others wrote the parameter since it was last seen: what completed the old value is gone."""
        master, written = state.get(MASTER), self._written.get(p)
        if master is None or written is None:
            return
        if written.version == p._version and (written.checksum is None or written.checksum == storage.checksum(p)):
            return
        if is_residual(master):
            master.zero_()
        else:
            storage.overwrite(master, read(p, None).to(master.device))
        self._mark(p)

    def _mark(self, p: Tensor) -> None:
        """Remember the parameter as the optimizer left it."""
        master = self.state[p].get(MASTER)
        if master is not None:
            self._written[p] = _Written(p._version, None if is_residual(master) else storage.checksum(p))

    # saving

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` gave, of this optimizer or of torch's of the same name.

        Moments in the formats of this optimizer are taken bit for bit, in others cast anew. A master of another kind
        is left out, and follows from the parameter. Load the model first: a parameter that is written afterwards drops
        its residual. The groups stay the same objects. Raises CheckpointError for a state that does not fit, before
        anything changed.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._check_groups(state_dict["param_groups"])
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        pairs = list(zip(self.parameters(), indices, strict=True))
        for p, index in pairs:
            self._check_saved(p, state_dict["state"].get(index, {}))
        self._load_groups(state_dict)
        for p, index in pairs:
            if state_dict["state"].get(index):
                self.take_state(p, state_dict["state"][index])
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load_groups(self, state_dict: Mapping[str, Any]) -> None:
        """Take up the groups, and drop the state."""
        groups, before, after = (
            self.param_groups, self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks,
        )  # fmt: skip
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        try:
            super().load_state_dict({**state_dict, "state": {}})
        finally:
            self._optimizer_load_state_dict_pre_hooks = before
            self._optimizer_load_state_dict_post_hooks = after
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups

    @torch.no_grad()
    def take_state(self, p: Tensor, saved: Mapping[str, Any]) -> None:
        """Make `saved`, as another optimizer keeps it for a parameter of that shape, the state of `p`.

        Raises CheckpointError for a state that does not fit.
        """
        self._check_saved(p, saved)
        self.state.pop(p, None)
        state = self._state_of(p)
        state["step"] = int(saved.get("step", 0))
        home = self._home_of(p)
        for name in self.moments:
            stored, spec = saved.get(name), self._moment_spec(p, name)
            if stored is None:
                continue
            moved = stored.detach().to(home, copy=True)
            same = storage.spec_of(stored) == spec and p.dtype is not torch.float64
            state[name] = moved if same else storage.encode(
                storage.decode(moved, p.shape).to(storage.wide_dtype(p)), spec
            )  # fmt: skip
        master, own = saved.get(MASTER), state.get(MASTER)
        if master is not None and own is not None and storage.spec_of(master) == storage.spec_of(own):
            state[MASTER] = master.detach().to(home, copy=True)
        self._mark(p)

    def _check_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        expected, found = ([len(group["params"]) for group in groups] for groups in (self.param_groups, saved))
        if expected != found:
            raise CheckpointError(
                f"expected groups of {expected} parameters, as the optimizer has, found {found}: build it with the "
                "groups that the state was saved from"
            )

    def _check_saved(self, p: Tensor, saved: Mapping[str, Any]) -> None:
        for name, value in saved.items():
            if name not in ("step", MASTER, *self.moments):
                raise CheckpointError(
                    f"'{self.name_of(p)}': {type(self).__name__} has no state '{name}'; expected "
                    f"{', '.join(['step', *self.moments])}: build the optimizer that it was saved from"
                )
            shapes = (p.shape, storage.matrix_shape(p.shape))
            if name != "step" and value is not None and value.shape not in shapes:
                raise CheckpointError(
                    f"'{self.name_of(p)}': expected a state '{name}' of shape {list(p.shape)}, as the parameter has, "
                    f"found {list(value.shape)}: it belongs to another model"
                )

    def __getstate__(self) -> dict[str, Any]:
        own = ("formats", "generator", "offload", "names", "_overrides", "_warns")
        # what parameters were given themselves does not survive torch's copying of them
        given = {p: overrides_of(p) for p in self.parameters() if overrides_of(p)}
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}, _GIVEN: given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        for p, fields in state.pop(_GIVEN, {}).items():
            setattr(p, ATTRIBUTE, fields)
        super().__setstate__(state)
        self._forget_all()
        for p in self.parameters():
            if p in self.state:
                self._mark(p)


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

"""The optimizer of low-precision state: what AdamW, Adam, SGD, Lion and Muon have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from narrowgauge.errors import CheckpointError, NarrowgaugeError
from narrowgauge.numerics import philox
from narrowgauge.numerics.formats import INT8
from narrowgauge.numerics.scaling import ULP
from narrowgauge.optim import offload as offloading
from narrowgauge.optim import storage
from narrowgauge.optim.formats import StateFormats
from narrowgauge.optim.rules import Hyper, Rule
from narrowgauge.optim.update import Item, is_residual, read, update, values_of_gradient, write_parameter
from narrowgauge.tensors.quantized import QuantizedTensor

MASTER = "master"


class _Written(NamedTuple):
    """What a parameter was when the optimizer last wrote it: a later write by others shows."""

    version: int
    checksum: int | None  # of a parameter beside a copy: writes to `.data` do not count versions


class LowPrecisionOptimizer(Optimizer):
    """A torch.optim.Optimizer whose state is kept in any format, for parameters in any format.

    state[p] holds "step" (an int), the rule's moments under torch's names, and "master" where there is one: plain
    tensors, QuantizedTensors, or PackedTensors below 8 bits. A step reads all of them as float32 (float64 for float64
    parameters), takes the step with the new moments as they are, and casts what it keeps with fresh scales; where the
    update of a value is zero, the parameter's and the master's bits stay.

    A parameter that was written by others since the last step (an initialisation, `load_state_dict`) is taken as it is
    now: its residual is dropped, and a master copy is made anew.

    formats: how state is kept, see `StateFormats`; `override` changes that for single parameters. generator: source of
    the random bits of stochastic rounding, one key a step; None: torch's default CPU generator. offload: "cpu" keeps
    the state on the host, where the step is then taken; None keeps it beside the parameter.
    """

    rule: ClassVar[Rule]
    moments: ClassVar[Mapping[str, str]]  # name in the state -> role

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        formats: StateFormats | None = None,
        *,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        generator: torch.Generator | None = None,
        offload: str | None = None,
    ) -> None:
        offloading.check(offload)
        self.offload = offload
        self.formats = formats or StateFormats()
        self.generator = generator
        self._overrides: list[tuple[str | Tensor, dict[str, Any]]] = []
        self._written: dict[Tensor, _Written] = {}
        self._key: Tensor | None = None
        self.names: dict[Tensor, str] = {}
        super().__init__(params, defaults)
        for glob, fields in (overrides or {}).items():
            self.override(glob, **fields)
        self._check_parameters()

    # formats of single parameters

    def override(self, which: str | Tensor, **fields: Any) -> None:
        """Keep the state of some parameters in other formats, before or after it was made.

        which: a parameter, or a glob over names, for which the optimizer was built from named parameters, or prepared.
        fields: those of `StateFormats`. Later overrides go over earlier ones. Raises NarrowgaugeError where no
        parameter is meant, RecipeError for an unknown field or a format that cannot play the role.
        """
        changed = [p for p in self.parameters() if self._is_meant(p, which)]
        if not changed:
            what = f"'{which}' matches none of its names" if isinstance(which, str) else "that is none of them"
            raise NarrowgaugeError(
                f"override: expected a parameter of this optimizer, or a glob over their names, found {what}; build "
                "the optimizer from model.named_parameters(), or prepare it, so that it knows names"
            )
        for p in changed:
            self.formats_of(p).replace(**fields)  # checked before anything changes
        self._overrides.append((which, dict(fields)))
        for p in changed:
            self._reformat(p)

    def formats_of(self, p: Tensor) -> StateFormats:
        """The formats of one parameter's state."""
        formats = self.formats
        for which, fields in (*getattr(p, "_narrowgauge_formats", ()), *self._overrides):
            if self._is_meant(p, which):
                # what is asked for by name holds whatever the size
                formats = formats.replace(**{"min_state_size": 0, **fields})
        return formats

    def parameters(self) -> Iterator[Tensor]:
        """The parameters, in the order of the groups."""
        for group in self.param_groups:
            yield from group["params"]

    def name_of(self, p: Tensor) -> str:
        """The parameter's name, where known, else its place."""
        if p in self.names:
            return self.names[p]
        for at, group in enumerate(self.param_groups):
            for i, other in enumerate(group["params"]):
                if other is p:
                    named = group.get("param_names")
                    return named[i] if named else f"parameter {i} of group {at}"
        return "a parameter of no group"

    def _is_meant(self, p: Tensor, which: str | Tensor) -> bool:
        return fnmatchcase(self.name_of(p), which) if isinstance(which, str) else p is which

    def _reformat(self, p: Tensor) -> None:
        """Bring the state that there is into the formats that hold now."""
        state = self.state.get(p)
        if not state:
            return
        values = self.full_values(p)
        for name in self.moments:
            if name in state:
                spec = self._moment_spec(p, name)
                if storage.spec_of(state[name]) != spec:
                    state[name] = storage.encode(storage.decode(state[name], p.shape), spec)
        state.pop(MASTER, None)
        self._make_master(p, values)

    # values

    @torch.no_grad()
    def full_values(self, p: Tensor) -> Tensor:
        """All digits of a parameter: float32 (float64 for float64), of p's shape, from it and its master. A copy."""
        state = self.state.get(p, {})
        self._take_up(p, state)
        master = state.get(MASTER)
        values = read(p, None if master is None else master.to(p.device))
        return values.clone() if values.data_ptr() == p.data_ptr() else values

    @torch.no_grad()
    def set_values(self, p: Tensor, values: Tensor) -> None:
        """Write `values` (floating, of p's shape) into a parameter and its master. The moments stay.

        A bfloat16 parameter without a master takes the nearest ones.
        """
        state = self._state_of(p)
        values = values.to(self._home_of(p), torch.float64 if p.dtype is torch.float64 else torch.float32)
        param = p if self.offload is None else offloading.copy_on_host(p)
        item = Item(param, state.get(MASTER), param, (), None, False, 0)  # type: ignore[arg-type]
        write_parameter(item, torch.full_like(values, torch.nan), values, None)
        if param is not p:
            p.copy_(param)
        self._mark(p)

    # the step

    @torch.compiler.disable  # so that a changed learning rate compiles nothing anew
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step for every parameter with a gradient. Returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_parameters(self.parameters())
        self._key = None
        return loss

    @torch.no_grad()
    def step_parameters(self, parameters: Iterable[Tensor]) -> None:
        """The step of those of the given parameters that have a gradient; `step` then ends it for all.

        Random bits are those that they would have in one step together.
        """
        items = self._items([p for p in parameters if p.grad is not None])
        if self.offload is None:
            self._update(items)
        else:
            offloading.step(items, lambda item: self._update([item]))
        for item in items:
            self._mark(item.param)

    def _update(self, items: list[Item]) -> None:
        for item in items:
            update(self.rule, item, self._step_key() if item.stochastic else None)

    def _items(self, parameters: list[Tensor]) -> list[Item]:
        for p in parameters:  # before anything changes
            self._check_gradient(p)
        wanted = set(parameters)
        items: list[Item] = []
        stream = -1
        for group in self.param_groups:
            hypers: dict[Any, Hyper] = {}
            for p in group["params"]:
                stream += 1
                if p not in wanted:
                    continue
                state = self._state_of(p)
                state["step"] += 1
                kind = self.kind_of_step(p, state)
                if kind not in hypers:
                    hypers[kind] = self.hyper(group, p, state)
                stochastic = p.dtype is torch.bfloat16 and self.formats_of(p).stochastic_rounding
                moments = tuple(state[name] for name in self.moments if name in state)
                grad = -values_of_gradient(p.grad, torch.float32) if group.get("maximize") else p.grad
                stochastic = stochastic and MASTER not in state
                items.append(Item(p, state.get(MASTER), grad, moments, hypers[kind], stochastic, stream))
        return items

    def kind_of_step(self, p: Tensor, state: dict[str, Any]) -> Any:
        """What, besides the group, the numbers of the step depend on."""
        return state["step"]

    def hyper(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> Hyper:
        """The numbers of the step of `p`, whose number, from 1, is state["step"]."""
        raise AssertionError("every optimizer has its own")

    def _step_key(self) -> Tensor:
        if self._key is None:
            self._key = philox.draw_key("cpu", self.generator)
        return self._key

    # state

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state["step"] = 0
            wide = torch.float64 if p.dtype is torch.float64 else torch.float32
            for name in self.moment_names(p):
                zeros = torch.zeros(p.shape, dtype=wide, device=self._home_of(p))
                state[name] = storage.encode(zeros, self._moment_spec(p, name))
            self._make_master(p, read(p, None))
        self._take_up(p, state)
        return state

    def _home_of(self, p: Tensor) -> torch.device:
        return p.device if self.offload is None else offloading.HOST

    def moment_names(self, p: Tensor) -> Iterable[str]:
        """Names of the moments that `p` has."""
        return self.moments

    def _moment_spec(self, p: Tensor, name: str) -> Any:
        return self.formats_of(p).of_moment(self.moments[name], p.numel())

    def _make_master(self, p: Tensor, values: Tensor) -> None:
        """A master of `values`, where the formats have one for this parameter; the parameter stays as it is."""
        spec = self.formats_of(p).master
        if spec is None:
            return
        if spec.scale is ULP:
            if p.dtype is torch.bfloat16 and not isinstance(p.data, QuantizedTensor):
                dtype = torch.int8 if spec.format is INT8 else torch.int16
                self.state[p][MASTER] = torch.zeros(p.shape, dtype=dtype, device=self._home_of(p))
        elif isinstance(p.data, QuantizedTensor) or p.dtype in (torch.bfloat16, torch.float16):
            self.state[p][MASTER] = storage.encode(values.to(self._home_of(p)), spec)
        self._mark(p)

    def _take_up(self, p: Tensor, state: dict[str, Any]) -> None:
        """Where others wrote the parameter since it was last seen: what completed the old value is gone."""
        master, written = state.get(MASTER), self._written.get(p)
        if master is None or written is None:
            return
        if written.version == p._version and (written.checksum is None or written.checksum == _checksum(p)):
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
            self._written[p] = _Written(p._version, None if is_residual(master) else _checksum(p))

    # checks

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; also refuses parameters that are not of a real floating dtype."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if not p.is_floating_point():
                del self.param_groups[-1]
                raise NarrowgaugeError(
                    f"expected parameters of a real floating dtype, found {p.dtype} of shape {list(p.shape)}: leave "
                    "them to an optimizer of their own, or use torch.view_as_real"
                )

    def _check_parameters(self) -> None:
        """What a subclass refuses about its groups when it is built."""

    def _check_gradient(self, p: Tensor) -> None:
        grad = p.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise NarrowgaugeError(
                f"'{self.name_of(p)}': expected a dense gradient, found layout {grad.layout}: build the embedding "
                "with sparse=False, or give it an optimizer of its own, torch.optim.SparseAdam"
            )
        if not grad.is_floating_point():
            raise NarrowgaugeError(f"'{self.name_of(p)}': expected a floating gradient, found {grad.dtype}")

    # saving

    def state_dict(self) -> dict[str, Any]:
        """As torch's. Codes and scales are in it as they are."""
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` gave, of this optimizer or of torch's of the same name.

        Moments in the formats of this optimizer are taken bit for bit, in others cast anew. A master of another kind
        is left out, and follows from the parameter. Load the model first: a parameter that is written afterwards drops
        its residual. Raises CheckpointError for a state that does not fit.
        """
        saved = dict(state_dict["state"])
        super().load_state_dict({**state_dict, "state": {}})
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        for index, p in zip(indices, self.parameters(), strict=True):
            if saved.get(index):
                self.take_state(p, saved[index])

    def take_state(self, p: Tensor, saved: Mapping[str, Any]) -> None:
        """Make `saved`, as another optimizer keeps it for a parameter of that shape, the state of `p`."""
        for name in saved:
            if name not in ("step", MASTER, *self.moments):
                raise CheckpointError(
                    f"'{self.name_of(p)}': {type(self).__name__} has no state '{name}'; expected "
                    f"{', '.join(['step', *self.moments])}: build the optimizer that it was saved from"
                )
        self.state.pop(p, None)
        state = self._state_of(p)
        state["step"] = int(saved.get("step", 0))
        for name, role in self.moments.items():
            stored = saved.get(name)
            if stored is None:
                continue
            self._check_size(p, name, stored)
            spec = self.formats_of(p).of_moment(role, p.numel())
            same = storage.spec_of(stored) == spec and p.dtype is not torch.float64
            state[name] = (
                _copy_of(stored, self._home_of(p))
                if same
                else storage.encode(storage.decode(_copy_of(stored, self._home_of(p)), p.shape), spec)
            )
        master, own = saved.get(MASTER), state.get(MASTER)
        if master is not None and own is not None and _same_kind(master, own):
            self._check_size(p, MASTER, master)
            state[MASTER] = _copy_of(master, self._home_of(p))
        self._mark(p)

    def _check_size(self, p: Tensor, name: str, stored: Tensor) -> None:
        if stored.numel() != p.numel():
            raise CheckpointError(
                f"'{self.name_of(p)}': expected a state '{name}' of {p.numel()} values, as the parameter has, found "
                f"shape {list(stored.shape)}: it belongs to another model"
            )

    def __getstate__(self) -> dict[str, Any]:
        own = ("formats", "generator", "offload", "_overrides", "names")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._written, self._key = {}, None
        for p in self.parameters():
            if p in self.state:
                self._mark(p)


def _same_kind(a: Tensor, b: Tensor) -> bool:
    if is_residual(a) or is_residual(b):
        return a.dtype is b.dtype
    return storage.spec_of(a) == storage.spec_of(b)


def _copy_of(stored: Tensor, device: torch.device) -> Tensor:
    return stored.detach().to(device, copy=True)


def _checksum(p: Tensor) -> int:
    """A number that follows from all bits of a parameter."""
    data = p.data
    parts = [data.codes, data.dequant_scale] if isinstance(data, QuantizedTensor) else [data]
    total = 0
    for part in parts:
        raw = part.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = raw.numel() // 8 * 8
        total += int(raw[:whole].view(torch.int64).sum()) * 31 + int(raw[whole:].sum(dtype=torch.int64))
    return total

"""An optimizer's state saved and loaded: of ours in any format, and of torch's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import CheckpointError
from narrowgauge.optim import storage
from narrowgauge.optim.overrides import ATTRIBUTE, overrides_of
from narrowgauge.optim.state import COPY, MASTER, LowPrecisionState
from narrowgauge.optim.update import read
from narrowgauge.tensors.local import local

_GIVEN = "_given"


class SavedState(LowPrecisionState):
    """The state of a `LowPrecisionOptimizer` as it goes into a checkpoint, and comes from one."""

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
        if not self.is_own(p):
            return
        state, held = self._state_of(p), self.held(p)
        if saved.get(COPY) is not None:  # more digits than have travelled to the parameter
            held.copy_(saved[COPY])
            state.pop(MASTER, None)
            self._make_master(p, read(held, None))
        state["step"] = int(saved.get("step", 0))
        home = self._home_of(p)
        for name in self.moments:
            stored, spec = saved.get(name), self._moment_spec(p, name)
            if stored is None:
                continue
            moved = local(stored).detach().to(home, copy=True)
            same = storage.spec_of(moved) == spec and held.dtype is not torch.float64
            state[name] = moved if same else storage.encode(
                storage.decode(moved, held.shape).to(storage.wide_dtype(held)), spec
            )  # fmt: skip
        master, own = saved.get(MASTER), state.get(MASTER)
        if master is not None and own is not None and storage.spec_of(master) == storage.spec_of(own):
            state[MASTER] = master.detach().to(home, copy=True)
        self.mark_written(p)

    def _check_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        expected, found = ([len(group["params"]) for group in groups] for groups in (self.param_groups, saved))
        if expected != found:
            raise CheckpointError(
                f"expected groups of {expected} parameters, as the optimizer has, found {found}: build it with the "
                "groups that the state was saved from"
            )

    def _check_saved(self, p: Tensor, saved: Mapping[str, Any]) -> None:
        for name, value in saved.items():
            if name not in ("step", MASTER, COPY, *self.moments):
                raise CheckpointError(
                    f"'{self.name_of(p)}': {type(self).__name__} has no state '{name}'; expected "
                    f"{', '.join(['step', *self.moments])}: build the optimizer that it was saved from"
                )
            shape = local(p).shape
            if name == "step" or value is None or local(value).shape in (shape, storage.matrix_shape(shape)):
                continue
            raise CheckpointError(
                f"'{self.name_of(p)}': expected a state '{name}' of shape {list(shape)}, as the parameter has, "
                f"found {list(local(value).shape)}: it belongs to another model"
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
        for name in ("partition", "shared_seed"):  # torch comes here for a copy, which has none, and when it loads
            vars(self).setdefault(name, None)
        self._forget_all()
        for p in self.parameters():
            if p in self.state:
                self.mark_written(p)

"""The optimizer of low-precision state: what AdamW, Adam, SGD, Lion and Muon have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor

from narrowgauge.numerics import philox
from narrowgauge.ops.reduce import Reducer
from narrowgauge.optim import checks, kernels, storage
from narrowgauge.optim import offload as offloading
from narrowgauge.optim.guard import StepGuard
from narrowgauge.optim.randomness import SharedSeed
from narrowgauge.optim.rules import Hyper, Rule
from narrowgauge.optim.saving import SavedState
from narrowgauge.optim.state import MASTER
from narrowgauge.optim.update import Item, update, values_of_gradient
from narrowgauge.optim.watch import UpdateWatch
from narrowgauge.tensors.local import is_distributed, local_grad

__all__ = ["MASTER", "LowPrecisionOptimizer"]


class LowPrecisionOptimizer(SavedState):
    """A torch.optim.Optimizer whose state is kept in any format, for parameters in any format.

    state[p] holds "step" (an int), the rule's moments under torch's names, and "master" where there is one: plain
    tensors, QuantizedTensors, or PackedTensors below 8 bits. A step reads all of them as float32 (float64 for float64
    parameters), takes the step with the new moments as they are, and casts what it keeps with fresh scales; where the
    update of a value is zero, the parameter's and the master's bits stay.

    Of a DTensor (a shard, or a part of a layer) the local part is stepped, and has the bits of the same rows of the
    whole, where scales do not reach over rows; state[p] holds plain local tensors. Formats go by the size of the whole.

    A parameter that was written by others since the last step (an initialisation, `load_state_dict`) is taken as it is
    now: its residual is dropped, and a master copy is made anew.

    formats: how state is kept, see `StateFormats`. overrides: glob over parameters' names -> fields of `StateFormats`,
    as `override` takes them. generator: source of the random bits of stochastic rounding, one key a step; None: torch's
    default CPU generator. offload: "cpu" keeps the state on the host, where the step is then taken; None keeps it
    beside the parameter. may_lose_updates: no warning of parameters that small updates leave where they are.

    torch's foreach and fused in a group choose between implementations of one step, and mean nothing here; amsgrad,
    differentiable and capturable are refused. `torch.compile(optimizer.step)` runs the step as it is.
    """

    rule: ClassVar[Rule]
    watches: tuple[UpdateWatch, ...] = ()  # what looks at a sampled step

    def _forget_all(self) -> None:
        super()._forget_all()
        self._key: Tensor | None = None
        self._streams: dict[Tensor, int] = {}
        self._plan: kernels.Plan | None = None

    @torch._disable_dynamo  # so that a changed learning rate compiles nothing anew
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step for every parameter with a gradient. Returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_parameters(self.parameters())
        self._key = None
        guard = StepGuard.on(self)
        if self.partition is not None and not (guard is not None and guard.is_skipping):
            self.partition.exchange(self)
        return loss

    @torch.no_grad()
    def step_parameters(self, parameters: Iterable[Tensor]) -> None:
        """The step of those of the given parameters that have a gradient; `step` then ends it for all.

        Random bits are those that they would have in one step together.
        """
        stepped = [p for p in parameters if p.grad is not None and self.is_own(p)]
        items = self._items(stepped)
        update = self._watched(self.watches, stepped) if self.watches else self._update
        if self.offload is None:
            update(items)
        else:
            offloading.step(items, lambda item: update([item]))
        for p in stepped:
            if is_distributed(p):
                torch.autograd.graph.increment_version(p)  # it sees no writes to its local part
            self.mark_written(p)

    def _update(self, items: list[Item]) -> None:
        key = self._step_key() if any(item.stochastic for item in items) else None
        self._plan = self._plan or kernels.Plan(self.rule)
        for item in self._plan.run(items, key):  # what no kernel takes
            update(self.rule, item, key)

    def _watched(self, watches: Iterable[UpdateWatch], stepped: list[Tensor]) -> Callable[[list[Item]], None]:
        """`_update` of one item after the other, in the order of `stepped`, with the same bits, looked at."""
        owners = (p for p in stepped if self.held(p).numel())

        def update(items: list[Item]) -> None:
            plan, self._plan = self._plan, None  # what is planned for all items at once stays
            try:
                for item in items:
                    p = next(owners)
                    roles = [self.moments[name] for name in self.moment_names(self.place_of(p).group)]
                    with ExitStack() as looks:
                        for watch in watches:
                            looks.enter_context(watch.step(p, self.rule, item, roles))
                        self._update([item])
            finally:
                self._plan = plan

        return update

    def _items(self, parameters: list[Tensor]) -> list[Item]:
        grads = [local_grad(p) for p in parameters]
        for p, grad in zip(parameters, grads, strict=True):  # before anything changes
            checks.check_gradient(p, grad, self.name_of)
        hypers: dict[Any, Hyper] = {}
        items: list[Item] = []
        for p, grad in zip(parameters, grads, strict=True):
            place, state = self.place_of(p), self._state_of(p)
            group, held = place.group, self.held(p)
            state["step"] += 1
            kind = (place.at, self.kind_of_step(p, state))
            if kind not in hypers:
                hypers[kind] = self.hyper(group, p, state)
            moments = self._moments_of(p, state, group)
            grad = -values_of_gradient(grad, storage.wide_dtype(held)) if group.get("maximize") else grad  # type: ignore[arg-type]
            stochastic = (
                held.dtype is torch.bfloat16 and MASTER not in state and self.formats_of(p).stochastic_rounding
            )  # fmt: skip
            if held.numel():  # a step of nothing is counted, and no more
                stream = self._stream_of(p) if stochastic else place.stream
                items.append(Item(held, state.get(MASTER), grad, moments, hypers[kind], stochastic, stream))  # type: ignore[arg-type]
        return items

    def kind_of_step(self, p: Tensor, state: dict[str, Any]) -> Any:
        """What, besides the group, the numbers of the step depend on."""
        return state["step"]

    def hyper(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> Hyper:
        """The numbers of the step of `p`, whose number, from 1, is state["step"]; moments may not be made yet."""
        raise AssertionError("every optimizer has its own")

    def share_randomness(self, reducer: Reducer, device: torch.device | str = "cpu") -> None:
        """Let all ranks of a group draw the same random bits for the same part of a parameter, and others for others.

        From now on a step's key follows from the seeds that the ranks' generators have now and from the number of the
        step, and what `reducer` agrees on is a part of the state dict. device: one that the reducer's group works on.
        """
        generator = torch.default_generator if self.generator is None else self.generator
        if self.shared_seed is not None:
            self.shared_seed.remove()
        self.shared_seed = SharedSeed(self, reducer, generator.initial_seed(), device)

    def _stream_of(self, p: Tensor) -> int:
        if self.shared_seed is None:
            return self.place_of(p).stream
        if p not in self._streams:
            self._streams[p] = self.shared_seed.stream(p, self.name_of(p))
        return self._streams[p]

    def _step_key(self) -> Tensor:
        if self._key is None:
            guard = StepGuard.on(self)
            if self.shared_seed is None:
                self._key = philox.draw_key("cpu", self.generator)
            else:
                self._key = self.shared_seed.key(0 if guard is None else guard.steps)
        return self._key

"""bfloat16 parameters that keep what nearest-even rounding would lose: each update is rounded stochastically.

For the step alone the optimizer works on float32 copies, and what it leaves is rounded to bfloat16, up or down in
proportion to the distance, so that the mean of many small updates is their sum (Gupta et al. 2015, arXiv:1502.02551;
Zamirai et al. 2020, arXiv:2010.06192). It sits on a stock torch optimizer as step hooks, as the guard does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from narrowgauge.numerics import kernels, philox
from narrowgauge.numerics.formats import BF16
from narrowgauge.optim.guard import parameters_of

NO_OPTIMIZER = (
    "prepared without an optimizer: none rounds updates of the bfloat16 parameters stochastically, and those below "
    "half a unit in the last place are lost; to train, give prepare the optimizer, too"
)
_ATTRIBUTE = "_narrowgauge_stochastic_rounding"
_COPIES = "_narrowgauge_copies"  # on the stand-in: its float32 copies, each with its parameter and stream


class StochasticRounding:
    """Steps of torch's AdamW, Adam and SGD (single, foreach, fused) on bfloat16 parameters, rounded stochastically.

    The step runs on a stand-in for the optimizer, whose groups hold float32 copies of the bfloat16 parameters that have
    a gradient, with float32 gradients and the optimizer's own state; moments are therefore float32. Afterwards the
    copies are rounded into the parameters. A step that raises leaves every parameter as it was. A parameter whose
    update is 0 keeps its bits, and one that is not bfloat16 is stepped as it is.

    Random bits: one key a step from `generator`, None being torch's default CPU generator, and in it one stream a
    parameter, by its place in the groups. A step in which nothing had a gradient, as a skipped one, draws none.

    Transient memory: during the step 8 bytes for each value of a parameter with a gradient (copy and gradient in
    float32), besides what torch's optimizer takes for itself in float32 (nothing when fused, 4 to 8 bytes a value of
    all parameters in its foreach form, of one parameter in its single-tensor form).

    Attach it after `StepGuard`, which must decide about the gradients before they are copied.
    """

    def __init__(self, optimizer: Optimizer, generator: torch.Generator | None = None) -> None:
        self._optimizer = optimizer
        self._generator = generator
        self._handles: list[Any] = []
        self._loading: dict[str, Any] | None = None

    @staticmethod
    def on(optimizer: Optimizer) -> StochasticRounding | None:
        """What is attached to `optimizer`, or None."""
        return getattr(optimizer, _ATTRIBUTE, None)

    def attach(self) -> None:
        """Round every step from now on, in place of an earlier one that is attached."""
        detach(self._optimizer)
        optimizer = self._optimizer
        after = optimizer.register_step_post_hook(self._after)
        # hooks of others, which may have been there before, shall find the new parameters
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            after,
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        setattr(optimizer, _ATTRIBUTE, self)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the step run on a stand-in. It is filled when the step calls its closure, after all other hooks."""
        closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
        stand_in = object.__new__(type(optimizer))
        vars(stand_in).update(vars(optimizer))

        def filled() -> Any:
            loss = None if closure is None else closure()
            with torch.no_grad():
                _fill(stand_in, optimizer)
            return loss

        return (stand_in, filled), {}

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stand_in = args[0]
        copies: list[tuple[int, Tensor, Tensor]] = vars(stand_in).pop(_COPIES)
        original = {copy: p for _, p, copy in copies}
        for tensor, entries in stand_in.state.items():
            optimizer.state[original.get(tensor, tensor)] = entries
        original.clear()
        stand_in.param_groups, stand_in.state = [], {}  # from here on `copies` alone holds the copies
        if not copies:
            return
        key = philox.draw_key("cpu", self._generator)
        copies.reverse()
        while copies:
            stream, p, copy = copies.pop()
            rounded = kernels.quantize(copy, None, BF16, key=key.to(p.device), stream=stream).codes
            assert rounded is not None
            p.copy_(rounded)

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._loading = state_dict

    def _after_load(self, optimizer: Optimizer) -> None:
        """Take the moments from the loaded state in float32: torch has cast them to the parameters' bfloat16."""
        loaded, self._loading = self._loading, None
        assert loaded is not None  # torch calls the one hook before the other
        indices = [index for group in loaded["param_groups"] for index in group["params"]]
        for index, p in zip(indices, parameters_of(optimizer), strict=True):
            for name, value in loaded["state"].get(index, {}).items():
                if p.dtype is torch.bfloat16 and _is_moment(name, value):
                    optimizer.state[p][name] = value.to(p.device, torch.float32, copy=True)


def install(optimizer: Optimizer, wanted: bool) -> None:
    """Attach StochasticRounding to `optimizer`, or undo that where it is not wanted; after `StepGuard.attach`."""
    detach(optimizer)
    if wanted:
        _widen_moments(optimizer)
        StochasticRounding(optimizer).attach()


def detach(optimizer: Optimizer) -> None:
    """Undo `StochasticRounding.attach`, where there was one."""
    attached = StochasticRounding.on(optimizer)
    if attached is not None:
        for handle in attached._handles:
            handle.remove()
        attached._handles = []
        delattr(optimizer, _ATTRIBUTE)


def _widen_moments(optimizer: Optimizer) -> None:
    """Bring moments that were made for a parameter in 16 bits into float32."""
    for p in parameters_of(optimizer):
        for name, value in optimizer.state.get(p, {}).items():
            if p.dtype is torch.bfloat16 and _is_moment(name, value):
                optimizer.state[p][name] = value.float()


def _is_moment(name: str, value: Any) -> bool:
    return name != "step" and isinstance(value, Tensor) and value.is_floating_point()


def _fill(stand_in: Optimizer, optimizer: Optimizer) -> None:
    """Give the stand-in the groups and the state of the optimizer, with float32 copies in the place of parameters."""
    copies: list[tuple[int, Tensor, Tensor]] = []
    instead: dict[int, Tensor] = {}
    state: defaultdict[Any, Any] = defaultdict(dict)
    state.update(optimizer.state)
    for stream, p in enumerate(parameters_of(optimizer)):
        if p.dtype is not torch.bfloat16 or p.grad is None:
            continue
        copy = p.detach().float()
        copy.grad = p.grad.detach().float()
        if p in optimizer.state:
            state[copy] = optimizer.state[p]
        copies.append((stream, p, copy))
        instead[id(p)] = copy
    stand_in.state = state
    stand_in.param_groups = [
        {**group, "params": [instead.get(id(p), p) for p in group["params"]]} for group in optimizer.param_groups
    ]
    setattr(stand_in, _COPIES, copies)

"""Exponential moving averages of parameters, in float32 whatever the parameters are stored in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.errors import CheckpointError, ConfigError, NarrowgaugeError
from narrowgauge.tensors.local import as_part_of, local
from narrowgauge.tensors.quantized import QuantizedTensor

_UPDATES, _AVERAGES = "updates", "averages"


class EMA:
    """Averages of a model's trainable parameters: average = decay * average + (1 - decay) * parameter.

    They are kept and updated in float32 (float64 for float64 parameters): in the 16 or 8 bits of the parameters
    themselves (1 - decay) * difference would be below the rounding step, and the average would never move. Buffers and
    frozen parameters are not averaged: they are the model's own.

    model: averages begin with its values. optimizer: the one that `prepare` returned, where it has digits of the
    parameters that the model has not (a residual or a master copy); None: the parameters are all there is. decay: in
    [0, 1], may be set at any time. updates: how many there were. Parameters are known by name, so that a model that is
    prepared by another recipe later goes on with its averages; give `optimizer` the new one then.

    Raises ConfigError for another decay, NarrowgaugeError for a model on the meta device.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None, decay: float = 0.999) -> None:
        if isinstance(decay, bool) or not isinstance(decay, float | int) or not 0 <= decay <= 1:
            raise ConfigError(f"decay={decay!r}: expected a number from 0 to 1, e.g. 0.999")
        self.model = model
        self.optimizer = optimizer
        self.decay = float(decay)
        self.updates = 0
        self._is_applied = False
        self.averages: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            if p.is_meta:
                raise NarrowgaugeError(
                    f"parameter '{name}' is on the meta device and has no values: call model.to_empty(device=...) and "
                    "initialise or load the model before it is averaged"
                )
            if p.requires_grad:
                self.averages[name] = self._values(p).clone(memory_format=torch.contiguous_format)

    @torch.no_grad()
    def update(self) -> None:
        """Take up the parameters as they are now: call it after each step of the optimizer."""
        self._refuse_while_applied("update")
        for name, p in self._parameters(self.model):
            average = self.averages[name].to(p.device)
            self.averages[name] = average.lerp_(self._values(p), 1 - self.decay)
        self.updates += 1

    @torch.no_grad()
    def copy_to(self, model: nn.Module | None = None) -> None:
        """Write the averages into the parameters of `model`, by name, cast as they are stored there.

        model: None: the averaged one, whose optimizer then has the digits that its parameters lose. Another one, such
        as a copy in float32, must have parameters of these names and shapes: raises NarrowgaugeError where not.
        """
        self._refuse_while_applied("copy_to")
        own = model is None or model is self.model
        write: Callable[[Any, Tensor], Any] | None = getattr(self.optimizer, "set_values", None) if own else None
        for name, p in list(self._parameters(self.model if model is None else model)):
            if write is None:
                p.copy_(self.averages[name])
            else:
                write(p, self.averages[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averages for its parameters; afterwards every bit is as it was.

        For evaluation: a step of the optimizer would be lost. A forward inside cannot be differentiated after the end,
        and torch says so; one from before can.
        """
        self._refuse_while_applied("applied")
        held = [(p, p.detach().clone(), p._version) for _, p in self._parameters(self.model)]
        self._is_applied = True
        try:
            with torch.no_grad():
                for name, p in self._parameters(self.model):
                    p.copy_(self.averages[name])
            yield
        finally:
            with torch.no_grad():
                for p, values, version in held:
                    p.copy_(values)
                    # what was saved by version, such as the optimizer's residual, belongs to these bits again
                    torch._C._autograd._unsafe_set_version_counter((p,), (version,))  # type: ignore[attr-defined]
            self._is_applied = False

    def state_dict(self) -> dict[str, Any]:
        """The averages by the parameters' names, as plain tensors, the number of updates, and the decay."""
        return {"decay": self.decay, _UPDATES: self.updates, _AVERAGES: dict(self.averages)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave. Raises CheckpointError where names or shapes are not this model's."""
        missing = [key for key in ("decay", _UPDATES, _AVERAGES) if key not in state_dict]
        if missing:
            raise CheckpointError(f"expected the state of an EMA, found none of its '{missing[0]}'")
        loaded: Mapping[str, Tensor] = state_dict[_AVERAGES]
        for name in (*self.averages, *loaded):
            if name not in loaded or name not in self.averages:
                where = "the saved averages lack" if name in self.averages else "the model does not train"
                raise CheckpointError(
                    f"{where} '{name}': expected the averages of the same parameters; build the EMA from the model "
                    "that they were saved of"
                )
            if loaded[name].shape != self.averages[name].shape:
                raise CheckpointError(
                    f"average '{name}': expected shape {list(self.averages[name].shape)}, found "
                    f"{list(loaded[name].shape)}: it belongs to another model"
                )
        for name, average in self.averages.items():
            average.copy_(loaded[name])
        self.decay, self.updates = float(state_dict["decay"]), int(state_dict[_UPDATES])

    def _parameters(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of `model` that have averages, by name."""
        found = dict(model.named_parameters())
        for name, average in self.averages.items():
            p = found.get(name)
            if p is None or p.shape != average.shape:
                what = "none" if p is None else f"shape {list(p.shape)}"
                raise NarrowgaugeError(
                    f"parameter '{name}': expected shape {list(average.shape)}, as it is averaged, found {what}: the "
                    "model must be the averaged one, or one like it"
                )
            yield name, p

    def _values(self, p: nn.Parameter) -> Tensor:
        full_values = getattr(self.optimizer, "full_values", None)
        if full_values is not None:
            return full_values(p)
        values = local(p).detach()
        wide = torch.float64 if values.dtype is torch.float64 else torch.float32
        return as_part_of(p, values.dequantize(wide) if isinstance(values, QuantizedTensor) else values.to(wide))

    def _refuse_while_applied(self, what: str) -> None:
        if self._is_applied:
            raise NarrowgaugeError(f"{what} inside `with ema.applied()`: the model has the averages now; call it after")

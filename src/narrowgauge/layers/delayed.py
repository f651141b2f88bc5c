"""Delayed scaling's state: buffers on the layer, rolled once a step.

For each role whose scale is delayed a layer holds `{role}_amax_history` (float32 [L], slot 0 live, the last slot the
newest finished) and `{role}_quant_scale` (float32, 0-dimensional); for all of them together `amax_rolls` (int64, rolls
so far) and `amax_pending` (bool, whether the layer ran since the last roll). They are saved with the model, and stay
float32 when the model changes its dtype. A layer of many experts has all this for each expert, in buffers with a
leading dimension of experts: an expert without tokens did not run.

Until `Delayed.warmup` rolls a role's scale follows from the tensor at hand, by the same formula.

Who rolls: the optimizer step of a model that was prepared with its optimizer; else the layer itself, at its first
training forward after a backward. Formulas: `numerics.scaling.roll`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from narrowgauge.numerics import scaling
from narrowgauge.numerics.formats import Format
from narrowgauge.numerics.scaling import Delayed
from narrowgauge.ops.linear import DelayedSlots, LinearCasts
from narrowgauge.ops.reduce import SINGLE_PROCESS, Reducer
from narrowgauge.recipes.spec import OPERAND_ROLES

HISTORY = "_amax_history"
SCALE = "_quant_scale"
ROLLS = "amax_rolls"
PENDING = "amax_pending"


class Rule(NamedTuple):
    """What a roll needs to know about one role of one layer."""

    format: Format
    scale: Delayed


def rules_of(casts: LinearCasts) -> dict[str, Rule]:
    """The delayed roles among a layer's operands."""
    found = {}
    for role in OPERAND_ROLES:
        spec = getattr(casts, role)
        if isinstance(spec.scale, Delayed):
            found[role] = Rule(spec.format, spec.scale)
    return found


class DelayedState(nn.Module):
    """The part of a layer that keeps delayed scaling's state."""

    delayed_rules: Mapping[str, Rule] = {}
    rolls_at_step: bool = False  # True: an optimizer step rolls; False: the layer does, before its next forward
    warming: bool = False  # whether a warm-up may last, as far as the host knows
    rolls_to_look: int = 0  # rolls at steps until it looks again
    weight: Tensor

    @property
    def amax_reducer(self) -> Reducer:
        """Over processes that hold parts of the layer, where it rolls by itself."""
        return SINGLE_PROCESS

    @property
    def state_shape(self) -> tuple[int, ...]:
        """() for one state; (experts,) where each expert has its own."""
        return ()

    def attach_delayed(self, rules: Mapping[str, Rule]) -> None:
        """Register fresh state for `rules`; state of other rules is dropped."""
        for name in state_names(self):
            del self._buffers[name]
        self.delayed_rules = dict(rules)
        for name, value in _fresh(self).items():
            self.register_buffer(name, value)
        self._look_later()

    def reset_delayed(self) -> None:
        """Histories of zeros, scales of one, nothing pending."""
        for name, value in _fresh(self).items():
            self.get_buffer(name).copy_(value)
        self._look_later()

    def delayed_slots(self) -> dict[str, DelayedSlots]:
        """What `ops.linear` reads and raises, by role."""
        rolls = _buffer(self, ROLLS) if self.warming else None
        return {
            role: DelayedSlots(_buffer(self, role + SCALE), _history(self, role), rolls if rule.scale.warmup else None)
            for role, rule in self.delayed_rules.items()
        }

    @property
    def longest_warmup(self) -> int:
        """In rolls, over all roles; 0 where there is none."""
        return max((rule.scale.warmup for rule in self.delayed_rules.values()), default=0)

    def _look_later(self) -> None:
        """The state is new to the host: a warm-up may last."""
        self.rolls_to_look = self.longest_warmup
        self.warming = self.rolls_to_look > 0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: _buffer(self, name) for name in state_names(self)}
        super()._apply(fn, recurse)
        for name, old in before.items():
            self._buffers[name] = _kept(self, name, old, _buffer(self, name))
        self._look_later()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        _fit(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._look_later()


def _buffer(layer: DelayedState, name: str) -> Tensor:
    value = layer._buffers[name]
    assert value is not None
    return value


def _history(layer: DelayedState, role: str) -> Tensor:
    return _buffer(layer, role + HISTORY)


def state_names(layer: DelayedState) -> list[str]:
    """The names of a layer's delayed-scaling buffers, which are also their state-dict keys."""
    if not layer.delayed_rules:
        return []
    return [role + suffix for role in layer.delayed_rules for suffix in (HISTORY, SCALE)] + [ROLLS, PENDING]


def is_state_name(name: str) -> bool:
    """True for a state-dict key's last part that names delayed-scaling state."""
    return name in (ROLLS, PENDING) or any(
        name == role + suffix for role in OPERAND_ROLES for suffix in (HISTORY, SCALE)
    )


def _fresh(layer: DelayedState) -> dict[str, Tensor]:
    if not layer.delayed_rules:
        return {}
    device, shape = layer.weight.device, layer.state_shape
    state: dict[str, Tensor] = {}
    for role, rule in layer.delayed_rules.items():
        state[role + HISTORY] = torch.zeros(*shape, rule.scale.history_length, dtype=torch.float32, device=device)
        state[role + SCALE] = torch.ones(shape, dtype=torch.float32, device=device)
    state[ROLLS] = torch.zeros(shape, dtype=torch.int64, device=device)
    state[PENDING] = torch.zeros(shape, dtype=torch.bool, device=device)
    return state


def _kept(layer: DelayedState, name: str, old: Tensor, new: Tensor) -> Tensor:
    """What a buffer is after `nn.Module._apply`: on the new device, in its own dtype, and never uninitialised."""
    if old.is_meta and not new.is_meta:  # materialised by to_empty: there is no value to keep
        return _fresh(layer)[name].to(new.device)
    return new if new.dtype is old.dtype else old.to(new.device)


def _fit(layer: DelayedState, state_dict: dict[str, Tensor], prefix: str) -> None:
    """Make the state in a checkpoint fit the layer: fresh where it has none, the newest entries where lengths differ.

    State of a role that the layer does not delay is left out: it means nothing to it.
    """
    names = state_names(layer)
    for key in [k for k in state_dict if k.startswith(prefix) and is_state_name(k[len(prefix) :])]:
        if key[len(prefix) :] not in names:
            del state_dict[key]
    for name, value in (_fresh(layer) if names else {}).items():
        saved = state_dict.get(prefix + name)
        if saved is None:
            state_dict[prefix + name] = value
        elif name.endswith(HISTORY):
            state_dict[prefix + name] = _resized(saved, value.shape[-1])
        else:
            state_dict[prefix + name] = saved.to(value.dtype)


def _resized(history: Tensor, length: int) -> Tensor:
    """The live slot and the newest finished entries of `history` [..., L], padded with zeros at the old end."""
    found = history.shape[-1]
    if history.dtype is torch.float32 and found == length:
        return history
    resized = torch.zeros(*history.shape[:-1], length, dtype=torch.float32, device=history.device)
    resized[..., 0] = history[..., 0]
    kept = min(length, found) - 1
    if kept:
        resized[..., -kept:] = history[..., -kept:]
    return resized


def roll(layers: Iterable[DelayedState], reducer: Reducer = SINGLE_PROCESS) -> None:
    """Finish a step: every live amax becomes the newest entry of its history, and scales follow where due.

    Layers, and experts of a layer, that did not run since the last roll keep their state. reducer: takes the maximum
    over data-parallel ranks, once for each device, of float32 [n]: all live amax values, then 1 or 0 for whether each
    layer or expert ran. Nothing here waits for the device.
    """
    by_device: dict[torch.device, list[DelayedState]] = defaultdict(list)
    for layer in layers:
        if layer.delayed_rules:
            by_device[_buffer(layer, ROLLS).device].append(layer)
    for group in by_device.values():
        pending = torch.cat([_buffer(layer, PENDING).view(-1) for layer in group])
        _roll_on_device(group, pending, reducer)
        _note_ends_of_warmups(group)


def _note_ends_of_warmups(layers: list[DelayedState]) -> None:
    """Let layers whose warm-ups are over go on without looking at their tensors first.

    The device is waited for at the roll that ends the warm-up of layers that always ran, and as many rolls later for
    those that did not; on all others the host only counts.
    """
    due: list[DelayedState] = []
    for layer in layers:
        if layer.warming:
            layer.rolls_to_look -= 1
            due += [layer] if layer.rolls_to_look == 0 else []
    if not due:
        return
    over = torch.stack([(_buffer(layer, ROLLS) >= layer.longest_warmup).all() for layer in due])
    for layer, is_over in zip(due, over.tolist(), strict=True):
        layer.warming, layer.rolls_to_look = not is_over, layer.longest_warmup


def roll_before_forward(layer: DelayedState) -> None:
    """The roll of a layer that no optimizer step rolls: due where a backward has followed the last forward."""
    pending = _buffer(layer, PENDING)
    if "grad_output" in layer.delayed_rules:
        # a backward leaves the amax of grad_output in its live slot, NaN included
        pending = pending & (_history(layer, "grad_output")[..., 0] != 0)
    _roll_on_device([layer], pending.view(-1), layer.amax_reducer)


def clear(layers: Iterable[DelayedState]) -> None:
    """Forget the live amax values: the step was skipped, and its tensors say nothing about later ones."""
    live: list[Tensor] = []
    for layer in layers:
        live += [_history(layer, role)[..., 0] for role in layer.delayed_rules]
        live += [_buffer(layer, PENDING)] if layer.delayed_rules else []
    if live:
        torch._foreach_zero_(live)


class _Entry(NamedTuple):
    """The state of one role of one layer, or of its experts: n units from number `first` of all that roll together."""

    first: int
    history: Tensor  # [n, L], a view of the buffer
    quant_scale: Tensor  # [n], a view of the buffer

    @property
    def units(self) -> range:
        return range(self.first, self.first + len(self.history))


@torch.no_grad()
def _roll_on_device(layers: list[DelayedState], pending: Tensor, reducer: Reducer) -> None:
    """Roll the state of `layers`, all on one device. pending: bool [units], one for each layer or expert of one."""
    waiting = [_buffer(layer, PENDING).view(-1) for layer in layers]
    counters = [_buffer(layer, ROLLS).view(-1) for layer in layers]
    sizes = [len(part) for part in waiting]
    groups: dict[tuple[Format, Delayed], list[_Entry]] = defaultdict(list)
    for layer, first in zip(layers, itertools.accumulate(sizes, initial=0), strict=False):
        for role, rule in layer.delayed_rules.items():
            history = _history(layer, role).view(-1, rule.scale.history_length)
            groups[rule.format, rule.scale].append(_Entry(first, history, _buffer(layer, role + SCALE).view(-1)))
    live = {key: torch.cat([entry.history[:, 0] for entry in entries]) for key, entries in groups.items()}
    if reducer is not SINGLE_PROCESS:  # one collective for all
        reduced = reducer.max_(torch.cat([*live.values(), pending.float()]))
        *parts, ran = reduced.split([*(len(part) for part in live.values()), len(pending)])
        live, pending = dict(zip(live, parts, strict=True)), ran > 0
    rolls = torch.cat(counters)
    for (fmt, rule), entries in groups.items():
        at = torch.tensor([unit for entry in entries for unit in entry.units], device=pending.device)
        due = rolls[at] % rule.interval == 0
        _roll_group(entries, live[fmt, rule], pending[at], due, fmt, rule)
    left = torch.cat(waiting) & ~pending
    torch._foreach_add_(counters, list(pending.long().split(sizes)))
    torch._foreach_copy_(waiting, list(left.split(sizes)))


def _roll_group(entries: list[_Entry], live: Tensor, ran: Tensor, due: Tensor, fmt: Format, rule: Delayed) -> None:
    """Roll all histories [n, L] of one format and rule at once. ran, due: bool [n]."""
    before = torch.cat([entry.history for entry in entries])
    before[:, 0] = live
    scale = torch.cat([entry.quant_scale for entry in entries])
    # the first roll always rescales, so that `due` alone decides
    after, renewed = scaling.roll(before, scale, fmt, rule, rolls_before=0)
    after = torch.where(ran.unsqueeze(-1), after, before)
    renewed = torch.where(ran & due, renewed, scale)
    sizes = [len(entry.units) for entry in entries]
    torch._foreach_copy_([entry.history for entry in entries], list(after.split(sizes)))
    torch._foreach_copy_([entry.quant_scale for entry in entries], list(renewed.split(sizes)))

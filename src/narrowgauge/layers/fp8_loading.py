"""`load_state_dict` of a prepared model takes weights in FP8 with their scales, and refuses codes without."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from narrowgauge.tensors.fp8_weights import dequantize_state, is_fp8


def install(model: nn.Module) -> None:
    """Let `model.load_state_dict` dequantize what is in FP8, in the layouts of `tensors.fp8_weights`; once is enough.

    A plain parameter would take the codes for values, hundreds of times too large, without an error.
    """
    hooks = model._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", hook) is _dequantize for hook in hooks):
        model.register_load_state_dict_pre_hook(_dequantize)


def _dequantize(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    mine = {name: value for name, value in state.items() if name.startswith(prefix) and isinstance(value, Tensor)}
    if not any(map(is_fp8, mine.values())):
        return
    wide = dequantize_state(mine, own=model.state_dict(prefix=prefix))
    for name in mine.keys() - wide.state.keys():
        del state[name]
    state.update(wide.state)
    if wide.ignored:
        name, why = next(iter(wide.ignored.items()))
        warnings.warn(f"{len(wide.ignored)} of the tensors left out, the first '{name}': {why}", stacklevel=2)

"""Layers that read the same tensor (q, k and v; gate and up) cast and save it once.

While a parent module with several quantized children runs, a store of casts is open for its thread; `ops.linear` looks
there before it casts an input. The store dies with the parent's forward, so that nothing is cached across calls.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from narrowgauge.ops.shared import SharedInputs

_MARK = "_narrowgauge_shares_inputs"


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.open: list[tuple[nn.Module, SharedInputs[Any]]] = []


_scopes = _Scopes()


def current() -> SharedInputs[Any] | None:
    """The store of the innermost parent that runs in this thread, or None."""
    # in compiled code equal casts are merged by the compiler
    if torch.compiler.is_compiling() or not _scopes.open:
        return None
    return _scopes.open[-1][1]


def install(parent: nn.Module) -> None:
    """Open a store during every forward of `parent`. Installing twice changes nothing."""
    if getattr(parent, _MARK, False):
        return
    parent.register_forward_pre_hook(_open, prepend=True)
    parent.register_forward_hook(_close, always_call=True)
    setattr(parent, _MARK, True)


def remove(parent: nn.Module) -> None:
    """Undo `install`."""
    for hooks, ours in ((parent._forward_pre_hooks, _open), (parent._forward_hooks, _close)):
        for key in [k for k, hook in hooks.items() if hook is ours]:
            del hooks[key]
            parent._forward_hooks_always_called.pop(key, None)
    parent.__dict__.pop(_MARK, None)


def _open(parent: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        _scopes.open.append((parent, SharedInputs()))


def _close(parent: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    # an exception may have skipped the opening hook of this parent, or the closing one of a child
    if not any(owner is parent for owner, _ in _scopes.open):
        return
    owner = None
    while owner is not parent:
        owner, store = _scopes.open.pop()
        store.clear()

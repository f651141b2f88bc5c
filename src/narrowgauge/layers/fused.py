"""torch's fused inference path of encoder layers: it reads the weights of their linear layers and never calls them.

nn.TransformerEncoderLayer takes it in eval mode without gradients, and nn.TransformerEncoder then packs padded batches
into nested tensors for it. With converted linear layers inside, both take the path of training instead.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from narrowgauge.layers.linear import Linear

_NESTED = "_narrowgauge_use_nested_tensor"  # the encoder's own choice, while ours is in force


def keep_layers_called(module: nn.Module) -> None:
    """Turn the fused path of `module` off where it would bypass a converted layer, and back on where none is left."""
    if not isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
        return
    bypasses = any(isinstance(part, Linear) and part.recipe is not None for part in module.modules())
    if isinstance(module, nn.TransformerEncoder):
        _choose_nested(module, bypasses)
    else:
        _choose_hook(module, bypasses)


def _choose_nested(encoder: nn.TransformerEncoder, bypasses: bool) -> None:
    own = encoder.__dict__.pop(_NESTED, encoder.use_nested_tensor)
    encoder.use_nested_tensor = own and not bypasses
    if bypasses:
        setattr(encoder, _NESTED, own)


def _choose_hook(layer: nn.TransformerEncoderLayer, bypasses: bool) -> None:
    for key in [k for k, hook in layer._forward_pre_hooks.items() if hook is _not_fused]:
        del layer._forward_pre_hooks[key]
    if bypasses:
        layer.register_forward_pre_hook(_not_fused)


def _not_fused(layer: nn.Module, args: Any) -> None:
    """Does nothing: a layer with a forward hook is not fused."""

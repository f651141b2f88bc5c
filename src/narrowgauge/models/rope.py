"""Rotary position embedding in the half-split layout of Hugging Face's Llama, with tables that stay float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def rope_tables(context: int, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / head_width): two float32 tensors [context, head_width / 2] on the CPU.

    Computed in float32 and in this order, as transformers' LlamaRotaryEmbedding does, so that the bits agree.
    Source: Su et al. 2021, arXiv:2104.09864.
    """
    exponent = torch.arange(0, head_width, 2, dtype=torch.int64, device="cpu").float() / head_width
    inverse_frequency = 1.0 / (theta**exponent)
    angle = torch.outer(torch.arange(context, dtype=torch.float32, device="cpu"), inverse_frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn feature i of the first half together with feature i of the second half by the position's angle.

    x [..., T, head_width]; cos, sin float32 [T, head_width / 2]. Computed in float32, returned in x's dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Rope(nn.Module):
    """The tables as buffers that are in no state dict, follow the module's device and keep float32.

    `module.to(torch.bfloat16)` would leave angles of positions above 256 wrong by whole turns, and `to_empty` would
    leave garbage: so every move recomputes the tables, on the CPU, and only then sends them to the device.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int, head_width: int, theta: float) -> None:
        super().__init__()
        self.context, self.head_width, self.theta = context, head_width, theta
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(context, head_width // 2, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the tables on the device where they are; on the meta device there is nothing to fill."""
        self._fill(self.cos.device)

    def _fill(self, device: torch.device) -> None:
        if device.type == "meta":
            self.cos, self.sin = (t.to(torch.float32) for t in (self.cos, self.sin))
        else:
            tables = rope_tables(self.context, self.head_width, self.theta)
            self.cos, self.sin = (t.to(device) for t in tables)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Rope:
        super()._apply(fn, recurse)
        self.reset_parameters()
        return self

    def forward(self, start: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin of positions start .. start + length - 1, each float32 [length, head_width / 2].

        device: where they are needed. Tables still on the meta device, as after loading a state dict by assignment,
        are computed there first.
        """
        if self.cos.is_meta:
            self._fill(device)
        return self.cos[start : start + length], self.sin[start : start + length]

    def extra_repr(self) -> str:
        return f"context={self.context}, head_width={self.head_width}, theta={self.theta}"

"""What travels between two stages of a pipeline: activations one way, their gradients the other, in one cast.

Codes and scales lie in one buffer that is seen as float32: autograd asks the gradient of a float tensor to have its
shape and dtype, so the same buffer carries codes of gradients backward. Nothing computes with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.distributed import codec, wire, wire_watch
from narrowgauge.distributed.two_way import two_way
from narrowgauge.errors import ConversionError
from narrowgauge.recipes.spec import CastSpec

ROLE = "pipeline_comm"
_FLOAT = torch.float32.itemsize


class Boundary:
    """One boundary: values of `shape` and `dtype` travel by `spec`; None: as they are."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, spec: CastSpec | None) -> None:
        self.shape, self.dtype, self.spec = shape, dtype, spec

    @property
    def is_coded(self) -> bool:
        """True where codes travel, and the carrier's values mean nothing as numbers."""
        return self.spec is not None and self.spec.in_blocks

    @property
    def wire_dtype(self) -> torch.dtype:
        """As it is counted."""
        return self.dtype if self.spec is None else codec.dtype_of(self.spec)

    def carrier(self, device: torch.device | str) -> Tensor:
        """An empty tensor like those that travel."""
        if self.spec is None or not self.is_coded:
            return torch.empty(self.shape, dtype=self.wire_dtype, device=device)
        words = -(-codec.wire_bytes(self.shape.numel(), self.spec) // _FLOAT)
        return torch.empty(words, dtype=torch.float32, device=device)

    def encode(self, values: Tensor) -> Tensor:
        """A carrier of these values, memory of its own: the process that sends it goes on computing."""
        if values.shape != self.shape or values.dtype is not self.dtype:
            raise ConversionError(
                f"expected {self.dtype} {list(self.shape)} between two pipeline stages, as at the first micro-batch, "
                f"found {values.dtype} {list(values.shape)}: let each part give the same for inputs of one shape"
            )
        carrier = self.carrier(values.device)
        if self.spec is None or not self.is_coded:
            carrier.copy_(values)
        else:
            wire_watch.sends(ROLE)
            stored = codec.encode(values.detach().reshape(1, -1), self.spec).view(-1)
            as_bytes = carrier.view(torch.uint8)
            as_bytes[: stored.numel()] = stored
            as_bytes[stored.numel() :] = 0
        wire.record(ROLE, "send", self.wire_dtype, carrier.nbytes)
        return carrier

    def decode(self, carrier: Tensor) -> Tensor:
        """The values that a carrier holds."""
        if self.spec is None or not self.is_coded:
            return carrier.to(self.dtype)
        numel = self.shape.numel()
        stored = carrier.detach().view(torch.uint8)[: codec.wire_bytes(numel, self.spec)]
        return codec.decode(stored.view(1, -1), numel, self.spec, self.dtype).view(self.shape)


def pack(values: Tensor, boundary: Boundary) -> Tensor:
    """What a stage sends on; in backward a carrier of gradients comes back and is decoded."""
    return two_way(values, boundary.encode, boundary.decode)


def unpack(carrier: Tensor, boundary: Boundary) -> Tensor:
    """What a stage has received; in backward the gradient is encoded into a carrier."""

    def decode(carrier: Tensor) -> Tensor:
        values = boundary.decode(carrier)
        return values.view_as(values) if values is carrier else values  # the buffer is received into again

    return two_way(carrier, decode, boundary.encode)

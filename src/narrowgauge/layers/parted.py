"""What a layer asks of whoever has parted its parameters over processes: the tensor-parallel forward is theirs."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from narrowgauge.ops.reduce import Reducer


class Parted(Protocol):
    """Runs a layer of which this process has a part of the features, heads or vocabulary.

    As `layer.parted`, of a Linear or an Embedding whose weight is a DTensor. The layer's own sizes, such as
    `in_features`, are those of the whole.
    """

    @property
    def reducer(self) -> Reducer:
        """Over the processes that hold parts of the layer."""
        ...

    def run(self, layer: Any, x: Tensor) -> Tensor:
        """The forward: what goes in and comes out, whole or in parts, is up to the place of the layer in its model."""
        ...

    def reset(self, layer: Any) -> None:
        """Draw the parameters anew, as the whole layer would, and keep this process's parts."""
        ...

    def load(self, layer: nn.Module, name: str, whole: Tensor) -> None:
        """Set the parameter `name` from the values of the whole: its shape, any dtype and device."""
        ...

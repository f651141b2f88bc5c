"""Linear layers whose features are parted over tensor-parallel ranks, and what moves around their products.

A column-parallel layer has some of the output features, reads whole inputs and feeds a row-parallel one, which has some
of the input features and whose outputs are summed. Between such pairs all ranks have the same activations or, in
sequence-parallel training, parts of the sequences: then the column-parallel layer gathers the codes of its input, and
the row-parallel one the codes of its grad_output. Source: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al.
2022, arXiv:2205.05198.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.distributed.activations import enter, gather, leave, scatter
from narrowgauge.distributed.layout import GroupReducer
from narrowgauge.distributed.sections import Sections
from narrowgauge.distributed.tensor_group import TensorGroup
from narrowgauge.errors import DataError
from narrowgauge.layers import sharing
from narrowgauge.layers.linear import Linear
from narrowgauge.ops.parted import PartedOperand, Parting
from narrowgauge.tensors.local import local


class PartedParameters:
    """The part of a layer's parameters that this rank has. sections: by the parameter's name; others are whole."""

    def __init__(self, group: TensorGroup, sections: dict[str, Sections]) -> None:
        self.group = group
        self.sections = sections

    @property
    def reducer(self) -> GroupReducer:
        """Over the ranks that hold the parts."""
        return self.group.reducer

    @torch.no_grad()
    def load(self, layer: nn.Module, name: str, whole: Tensor) -> None:
        """Set a parameter from the values of the whole."""
        p: Tensor = getattr(layer, name)
        sections = self.sections.get(name)
        local(p).copy_(whole if sections is None else sections.take(whole, self.group.rank))

    def load_all(self, layer: nn.Module, whole: nn.Module) -> None:
        """Set all parameters from those of a whole layer."""
        for name, p in whole.named_parameters():
            self.load(layer, name, p.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> PartedParameters:
        return self  # process groups cannot be copied


class PartedLinear(PartedParameters):
    """A linear layer that is parted one way or the other.

    dims: of the parameters along which they are parted. operands: of the roles whose matrix is parted along with the
    features, the dimension.
    """

    dims: ClassVar[dict[str, int]]
    operands: ClassVar[dict[str, int]]
    gathers: ClassVar[str]  # the role that is parted along the sequence, see `ops.parted.Parting`

    def reset(self, layer: Linear) -> None:
        """As nn.Linear's, of the whole."""
        whole = nn.Linear(
            layer.in_features, layer.out_features, layer.bias is not None, device=local(layer.weight).device
        )
        self.load_all(layer, whole)

    def product(self, layer: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product by the layer's recipe, with the scales of the whole operands."""
        group = self.group
        dims = dict(self.operands)
        parts_sequences = group.parts_sequences
        if parts_sequences:
            dims[self.gathers] = 0
        parted = {role: PartedOperand(dim, group.reducer) for role, dim in dims.items()}
        parted["weight"] = PartedOperand(self.dims["weight"], group.reducer, group.known(layer))
        if parts_sequences:
            return layer.product(x, bias, Parting(parted, group.exchange, self.gathers))
        return layer.product(x, bias, Parting(parted))

    def check_tokens(self, x: Tensor) -> None:
        """Raise DataError where the sequences of `x` do not divide."""
        ranks = self.group.ranks
        if x.ndim < 2 or x.shape[-2] % ranks:
            raise DataError(
                f"sequence parallel: expected sequences of a multiple of {ranks} tokens, found an activation of shape "
                f"{list(x.shape)}: pad the sequences, or leave sequence parallelism out"
            )


class Column(PartedLinear):
    """Output features are parted: weight and bias along their rows."""

    dims = {"weight": 0, "bias": 0}
    operands = {"grad_output": 1}
    gathers = "input"

    def run(self, layer: Linear, x: Tensor) -> Tensor:
        """x [..., K], in sequence-parallel training a part of the sequences -> this rank's features of the output."""
        exchange = self.group.exchange
        if not self.group.parts_sequences:
            x = self._entered(x)
        elif layer.recipe is None:
            x = gather(x, exchange)
        if layer.recipe is not None:
            return self.product(layer, x, layer.bias)
        return F.linear(x, _own(layer.weight), None if layer.bias is None else _own(layer.bias))

    def _entered(self, x: Tensor) -> Tensor:
        """One for all siblings that read `x`, so that their gradients are summed over ranks together."""
        store = sharing.current()
        found = None if store is None else store.get(x, "entered")
        if found is None:
            found = enter(x, self.group.exchange)
            if store is not None:
                store.put(x, "entered", found)
        return found


class Row(PartedLinear):
    """Input features are parted: the weight along its columns. The bias is whole, and added to the sum."""

    dims = {"weight": 1}
    operands = {"input": 1}
    gathers = "grad_output"

    def run(self, layer: Linear, x: Tensor) -> Tensor:
        """This rank's features x [..., K / ranks] -> the output, in sequence-parallel training a part of it."""
        group = self.group
        if group.parts_sequences:
            self.check_tokens(x)
            bias = None if layer.bias is None else group.sums.of(layer.bias, layer, wide=True)
            if layer.recipe is not None:
                return self.product(layer, x, bias)
            y = scatter(F.linear(x, _own(layer.weight)), group.exchange)
        else:
            bias = layer.bias
            y = self.product(layer, x, None) if layer.recipe is not None else F.linear(x, _own(layer.weight))
            y = leave(y, group.exchange)
        return y if bias is None else (y.float() + bias.to(y.dtype).float()).to(y.dtype)


class Head(Column):
    """A column-parallel output layer whose logits are gathered, for models that take the loss from all of them."""

    def run(self, layer: Linear, x: Tensor) -> Tensor:
        """x [..., K] -> all logits [..., vocabulary], the same on every rank."""
        from narrowgauge.distributed.vocabulary import gather_logits

        return gather_logits(super().run(layer, x), self.sections["weight"].sizes[0], self.group)


def _own(p: Any) -> Tensor:
    """This rank's part of a DTensor parameter, with the gradient laid out as it is."""
    return p.to_local()

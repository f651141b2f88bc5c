"""One stage as torch's schedules call it, and the forward pass that needs no schedule: for validation, and to learn the
shapes of what travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.distributed import wire
from narrowgauge.distributed.boundary import Boundary, pack, unpack
from narrowgauge.distributed.stages import SideLoss, Span, StagedGPT, StagedSequential
from narrowgauge.errors import ConversionError
from narrowgauge.ops.deferred import WeightGradients, putting_off
from narrowgauge.recipes.spec import CastSpec

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER = 12  # dtype, dimensions, sizes


class Places(NamedTuple):
    """Where stages are: the group of the pipeline, the rank in it of this process, and of every stage."""

    group: dist.ProcessGroup
    rank: int
    of_stage: tuple[int, ...]

    def is_here(self, stage: int) -> bool:
        """True for a stage of this rank."""
        return 0 <= stage < len(self.of_stage) and self.of_stage[stage] == self.rank


class StageRun(nn.Module):
    """One stage: what was received is decoded, the layers run, and what is sent is encoded.

    reads, sends: the boundaries before and after it; None: at the ends of the pipeline, and to stages of this rank,
    which take values as they are. later: takes the weight gradients that are a pass of their own; None: there is none.
    """

    def __init__(
        self,
        model: StagedGPT | StagedSequential,
        span: Span,
        reads: Boundary | None,
        sends: Boundary | None,
        later: WeightGradients | None,
    ) -> None:
        super().__init__()
        self.model, self.span, self.reads, self.sends, self.later = model, span, reads, sends, later
        self.tokens = 0
        self.side = SideLoss()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """A carrier, or the pipeline's input -> a carrier, or the loss, 0-dim float32."""
        if self.reads is not None:
            x = unpack(x, self.reads)
        with putting_off(self.later) if self.later is not None else nullcontext():
            y = self.model(x, targets, span=self.span, tokens=self.tokens, side=self.side)
        return y if self.sends is None else pack(y, self.sends)


def tokens_of(inputs: Tensor) -> int:
    """Positions in a batch of token ids [B, T]; 0 for inputs of other kinds."""
    return inputs.shape[1] if inputs.dim() > 1 else 0


@torch.no_grad()
def forward_only(
    model: StagedGPT | StagedSequential,
    places: Places,
    inputs: Tensor,
    targets: Tensor,
    spec: CastSpec | None,
    side: SideLoss,
    note: Callable[[Span, Tensor, Tensor], None] | None = None,
) -> Tensor:
    """Bring one batch through all stages: the loss on the rank of the last stage, zero on the others, 0-dim float32.

    What travels says its shape and dtype first. note: told what each stage of this rank read and gave.
    """
    loss = torch.zeros((), dtype=torch.float32, device=inputs.device)
    handed_on: dict[int, Tensor] = {}
    under_way: list[tuple[dist.Work | None, Tensor]] = []
    for span in model.spans:
        if span.is_first:
            x = inputs
        elif places.is_here(span.index - 1):
            x = handed_on.pop(span.index)
        else:
            x = _receive(places, span.index - 1, spec, inputs.device)
        y = model(x, targets, span=span, tokens=tokens_of(inputs), side=side)
        if note is not None:
            note(span, x, y)
        if span.is_last:
            loss = y.float()
        elif places.is_here(span.index + 1):
            handed_on[span.index + 1] = y
        else:
            under_way += _send(places, span.index + 1, y, spec)
    for work, _ in under_way:
        if work is not None:
            work.wait()
    return loss


def _send(places: Places, stage: int, values: Tensor, spec: CastSpec | None) -> list[tuple[dist.Work | None, Tensor]]:
    """Start sending; the tensors must live until the ends."""
    if values.dtype not in _DTYPES or values.dim() > _HEADER - 2:
        raise ConversionError(
            f"expected a floating tensor of at most {_HEADER - 2} dimensions between two pipeline stages, found "
            f"{values.dtype} {list(values.shape)}: put these two parts into one"
        )
    sizes = [*values.shape, *[0] * (_HEADER - 2 - values.dim())]
    header = torch.tensor([_DTYPES.index(values.dtype), values.dim(), *sizes], device=values.device)
    wire.record(wire.CONTROL, "send", header.dtype, header.nbytes)
    carrier = Boundary(values.shape, values.dtype, spec).encode(values)
    to = places.of_stage[stage]
    return [(dist.isend(each, group=places.group, group_dst=to), each) for each in (header, carrier)]


def _receive(places: Places, stage: int, spec: CastSpec | None, device: torch.device) -> Tensor:
    source = places.of_stage[stage]
    header = torch.empty(_HEADER, dtype=torch.int64, device=device)
    dist.recv(header, group=places.group, group_src=source)
    dtype, dims, *sizes = header.tolist()
    boundary = Boundary(torch.Size(sizes[:dims]), _DTYPES[dtype], spec)
    carrier = boundary.carrier(device)
    dist.recv(carrier, group=places.group, group_src=source)
    return boundary.decode(carrier)


class Shape(NamedTuple):
    """What a stage reads or gives for one sample, [1, ...], or a loss, []."""

    sizes: torch.Size
    dtype: torch.dtype

    def of(self, samples: int) -> torch.Size:
        """For a micro-batch."""
        return torch.Size((samples, *self.sizes[1:])) if self.sizes else self.sizes


def learn_shapes(
    model: StagedGPT | StagedSequential, places: Places, batch: Sequence[Tensor], spec: CastSpec | None
) -> dict[int, tuple[Shape, Shape]]:
    """What each stage of this rank reads and gives, learnt from one sample of zeros.

    In evaluation mode, where delayed scaling records nothing and no statistics move, and with random numbers that are
    given back.
    """
    found: dict[int, tuple[Shape, Shape]] = {}

    def note(span: Span, x: Tensor, y: Tensor) -> None:
        if not span.is_last and (y.dim() == 0 or y.shape[0] != 1):
            raise ConversionError(
                f"expected samples along dimension 0 of what part '{span.names[-1]}' gives, for one sample [1, ...], "
                f"found {list(y.shape)}: let it keep that dimension"
            )
        found[span.index] = (Shape(x.shape, x.dtype), Shape(y.shape, y.dtype))

    inputs, targets = (torch.zeros_like(x[:1]) for x in batch)
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with _evaluating(model), torch.random.fork_rng(devices):
        forward_only(model, places, inputs, targets, spec, SideLoss(), note)
    return found


@contextmanager
def _evaluating(model: nn.Module) -> Any:
    """Evaluation mode inside, and afterwards each module's own."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training

"""Collectives of quantized values over any process group: codes and scales travel as bytes, sums are float32.

A reduction is an all-to-all of codes, a sum in float32 in the order of ranks, one division, one requantization with
fresh scales, and an all-gather of those codes: the bytes of a ring in that format, with neither under- nor overflow in
the sum, and the same bits on every rank and backend. Each function starts its communication and returns a `Pending`;
nothing waits for a CUDA device but the streams that need the data.

A block that is not finite on any rank arrives as NaN on all that receive it. Random bits of a stochastic spec: one key
may be the same on all ranks, as each takes streams of its own. Blocks are those of the values in logical order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed import codec, wire, wire_watch
from narrowgauge.distributed.feedback import ErrorFeedback
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.recipes.spec import CastSpec

Group = dist.ProcessGroup | None  # None: all processes
# its name from torch 2.13 on; the older one is deprecated there
start_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """A collective under way. `wait` ends it and gives its result, once computed; `advance` goes one phase further."""

    def __init__(self, work: dist.Work | None, finish: Callable[[], Tensor | Pending]) -> None:
        self._work = work
        self._finish: Callable[[], Tensor | Pending] | None = finish
        self._result: Tensor | Pending | None = None

    def advance(self) -> None:
        """Wait for the phase under way and start the next: on every rank in the same order."""
        if self._finish is None:
            return
        if self._work is not None:
            self._work.wait()
        finish, self._finish = self._finish, None
        self._result = finish()

    def wait(self) -> Tensor:
        """The result."""
        self.advance()
        assert self._result is not None
        return self._result.wait() if isinstance(self._result, Pending) else self._result


def padded(numel: int, spec: CastSpec, ranks: int) -> int:
    """The length to which a reduction fills `numel` values with zeros: every rank's part is whole blocks."""
    multiple = ranks * codec.block_of(spec)
    return -(-numel // multiple) * multiple


def all_gather(
    values: Tensor, spec: CastSpec, group: Group, role: str, *, key: Tensor | None = None, out: Tensor | None = None
) -> Pending:
    """The values of all ranks, one row each: `values` [n], the same n on every rank, give float32 [ranks, n].

    out: contiguous, of ranks * n values, float32 or bfloat16: it takes them instead.
    """
    ranks, rank = _place(group, role, spec)
    numel = values.numel()
    _check_out(out, ranks * numel)
    sent = codec.encode_flat(values, 1, numel, spec, key, stream=_stream(rank, 1))
    return _gathered(sent, ranks, spec, group, role, numel, ranks * numel, (ranks, numel), out)


def reduce_scatter(
    values: Tensor,
    spec: CastSpec,
    group: Group,
    role: str,
    *,
    average: bool = True,
    key: Tensor | None = None,
    feedback: ErrorFeedback | None = None,
) -> Pending:
    """This rank's part of the mean (or sum) over ranks: `values` [ranks * n] give float32 [n]; rank r has part r.

    feedback: of this very reduction in every step, see `ErrorFeedback`.
    """
    ranks, rank = _place(group, role, spec)
    numel = _part_of(values, ranks)
    residual = None if feedback is None else feedback.sent(values)
    sent = codec.encode_flat(values, ranks, numel, spec, key, stream=_stream(rank, 0), residual=residual)
    work, received = _exchanged(sent, ranks, spec, group, role)
    return Pending(work, lambda: codec.reduce(received, numel, spec, ranks if average else 1))


def all_reduce(
    values: Tensor,
    spec: CastSpec,
    group: Group,
    role: str,
    *,
    average: bool = True,
    key: Tensor | None = None,
    feedback: ErrorFeedback | None = None,
    out: Tensor | None = None,
) -> Pending:
    """The mean (or sum) over ranks, the same bits on each: `values` [n] give float32 [n]. Two phases, see `advance`.

    feedback: of this very reduction in every step, see `ErrorFeedback`. out: contiguous, of n values, float32 or
    bfloat16, e.g. `values` itself: it takes the result instead.
    """
    ranks, rank = _place(group, role, spec)
    numel, part = values.numel(), padded(values.numel(), spec, ranks) // ranks
    _check_out(out, numel)
    residual = None if feedback is None else feedback.sent(values)
    sent = codec.encode_flat(values, ranks, part, spec, key, stream=_stream(rank, 0), residual=residual)
    work, received = _exchanged(sent, ranks, spec, group, role)

    def gather() -> Pending:
        residual = None if feedback is None else feedback.reduced(part, received.device)
        divisor, stream = ranks if average else 1, _stream(rank, 1)
        mean = codec.reduce_and_encode(received, part, spec, divisor, key, stream=stream, residual=residual)
        return _gathered(mean, ranks, spec, group, role, part, numel, (numel,), out)

    return Pending(work, gather)


def all_to_all(values: Tensor, spec: CastSpec, group: Group, role: str, *, key: Tensor | None = None) -> Pending:
    """Rows for every rank: `values` [ranks, n], row r to rank r, give float32 [ranks, n], row r from rank r."""
    ranks, rank = _place(group, role, spec)
    numel = _part_of(values, ranks)
    sent = codec.encode_flat(values, ranks, numel, spec, key, stream=_stream(rank, 0))
    work, received = _exchanged(sent, ranks, spec, group, role)
    return Pending(work, lambda: codec.decode(received, numel, spec))


def send(values: Tensor, spec: CastSpec, to: int, group: Group, role: str, *, key: Tensor | None = None) -> None:
    """Send values of any shape to rank `to` of the group; it calls `recv` with their shape."""
    _, rank = _place(group, role, spec)
    buffer = codec.encode_flat(values, 1, values.numel(), spec, key, stream=_stream(rank, 0)).flatten()
    if buffer.numel():
        dist.send(buffer, group=group, group_dst=to)
    wire.record(role, "send", codec.dtype_of(spec), buffer.numel())


def recv(shape: torch.Size, spec: CastSpec, source: int, group: Group, device: torch.device | str = "cpu") -> Tensor:
    """Values of `shape` from rank `source` of the group: float32."""
    buffer = torch.empty(codec.wire_bytes(shape.numel(), spec), dtype=torch.uint8, device=device)
    if buffer.numel():
        dist.recv(buffer, group=group, group_src=source)
    return codec.decode(buffer.view(1, -1), shape.numel(), spec).view(shape)


def _place(group: Group, role: str, spec: CastSpec) -> tuple[int, int]:
    """Ranks of the group, and this process's place among them. Raises RecipeError for a cast that cannot travel."""
    codec.check(role, spec)
    wire_watch.sends(role)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise NarrowgaugeError(
            f"process {dist.get_rank()} is not in the group that it communicates over: let only its ranks call this"
        )
    return ranks, rank


def _check_out(out: Tensor | None, numel: int) -> None:
    """Raise NarrowgaugeError for a tensor that does not take `numel` values."""
    if out is None:
        return
    if out.numel() != numel or not out.is_contiguous() or out.dtype not in (torch.float32, torch.bfloat16):
        layout = "" if out.is_contiguous() else ", not contiguous"
        raise NarrowgaugeError(
            f"out: expected a contiguous float32 or bfloat16 tensor of {numel} values, found {out.dtype} "
            f"{list(out.shape)}{layout}"
        )


def _part_of(values: Tensor, ranks: int) -> int:
    """Values for each rank."""
    if values.numel() % ranks:
        raise NarrowgaugeError(
            f"expected a multiple of {ranks} values, as many for each rank, found {values.numel()}: fill them up with "
            "zeros"
        )
    return values.numel() // ranks


def _stream(rank: int, phase: int) -> int:
    """The stream of a cast's random bits: no two casts of a collective share one."""
    return 2 * rank + phase


def _exchanged(sent: Tensor, ranks: int, spec: CastSpec, group: Group, role: str) -> tuple[dist.Work | None, Tensor]:
    """Row r of uint8 [ranks, bytes] goes to rank r: the work, and where row r from rank r arrives."""
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True) if sent.numel() else None
    wire.record(role, "all_to_all", codec.dtype_of(spec), sent.numel() * (ranks - 1) // ranks)
    return work, received


def _gathered(
    sent: Tensor, ranks: int, spec: CastSpec, group: Group, role: str, n: int, numel: int, shape: tuple[int, ...],
    out: Tensor | None,
) -> Pending:  # fmt: skip
    """Every rank's row of `n` values, of which the first `numel` count, as `shape`, or in `out`."""
    received = sent.new_empty(ranks, sent.numel())
    work = start_gather(received.view(-1), sent.flatten(), group=group, async_op=True) if sent.numel() else None
    wire.record(role, "all_gather", codec.dtype_of(spec), sent.numel() * (ranks - 1))

    def decoded() -> Tensor:
        values = codec.decode_flat(received, numel, n, spec, out=out)
        return values.view(shape) if out is None else out

    return Pending(work, decoded)

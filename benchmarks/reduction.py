"""What reductions of gradients in few bits cost: signal to noise, time on a CPU, and the loss with error feedback.

    python benchmarks/reduction.py [--parts snr cost feedback] [--repeats 15] [--steps 200] [--seeds 3] [--json]

snr: the gradients of 64 different batches of the reference model (`reference.py`), after 100 steps of training in
float32, are averaged as 64 ranks would, all in this process. Ours (`collectives`) takes blocks of 128 values with sums
in float32. FP8-LM's (`fp8_lm`) takes one scale a parameter; its codes are added around a ring, or summed in float32 and
cast once, which leaves what pre-, post- and auto-scaling do to the values: in the ring the rounding of 63 hops hides
it. Underflow is the share of what ranks send that is not zero and has code 0.

cost: two processes, one thread each: quantize 64 MiB, sum and requantize a half, dequantize 64 MiB, against gloo's
all-reduce of the same float32 on loopback. A round measures both; the slower rank counts.

feedback: the reference model on four simulated ranks whose gradients travel in 4 bits (E2M1FN, blocks of 128). Error
feedback helps the sum over steps (see snr), which with AdamW, 200 steps and this model no loss depends on: 4 bits are
as good as float32 there, with feedback and without.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import common
import reference
import torch
import torch.distributed as dist
from reference import BATCH, Setting
from tables import goal, is_met
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.distributed import codec, collectives
from narrowgauge.distributed.feedback import ErrorFeedback
from narrowgauge.distributed.fp8_lm import Fp8LmReduction, Scaling
from narrowgauge.numerics import kernels, measure, scaling
from narrowgauge.numerics.formats import E2M1FN, E4M3FN
from narrowgauge.recipes.casts import WIRE

PLAIN = Setting(ng.recipe("fp32"))
RANKS, TRAINED_STEPS, AUTO_STEPS = 64, 100, 40
COST_VALUES = 1 << 24  # 64 MiB of float32
BITS_4 = ng.CastSpec(E2M1FN, ng.Block(1, 128), ng.E8M0_UP)
FEEDBACK_RANKS = 4
FP32_LABEL, UNFED, FED = "FP32", "4 bits", "4 bits with error feedback"
LEAST_DIFFERENCE = 0.001  # % of values: more than rounding of shares
SUMS = {"FP32 sum": False, "FP8 ring": True}


def gradients(steps: int = TRAINED_STEPS) -> list[Tensor]:
    """Of every parameter of the reference model: the gradients of as many batches as there are ranks, [ranks, n]."""
    model, optimizers = reference.build(PLAIN, seed=0)
    text = reference.load_text()
    batches = torch.Generator().manual_seed(1000)
    for step in range(steps):
        _backward(model, optimizers, step, text, batches)
        ng.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
    found = []
    for _ in range(RANKS):
        _backward(model, optimizers, steps, text, batches)
        found.append([_grad(p).flatten().clone() for p in model.parameters()])
    return [torch.stack(rows) for rows in zip(*found, strict=True)]


def _backward(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int, text: Tensor, batches: torch.Generator
) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = reference.learning_rate(step, 600)
    model.zero_grad()
    model(*reference.sample(text[: len(text) * 9 // 10], BATCH, batches))[1].backward()


def _grad(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad.detach()


def reduced(rows: Sequence[Tensor] | Tensor, spec: ng.CastSpec, feedback: list[ErrorFeedback] | None = None) -> Tensor:
    """What `collectives.all_reduce` gives of the values [n] of ranks, all in this process. feedback: of every rank."""
    ranks, n = len(rows), rows[0].numel()
    part = collectives.padded(n, spec, ranks) // ranks
    residuals = [None] * ranks if feedback is None else [each.sent(rows[0]) for each in feedback]
    sent = [codec.encode_flat(row, ranks, part, spec, residual=r) for row, r in zip(rows, residuals, strict=True)]
    received = torch.stack(sent, dim=1)
    residuals = [None] * ranks if feedback is None else [each.reduced(part, received.device) for each in feedback]
    means = [
        codec.reduce_and_encode(of_rank, part, spec, ranks, residual=r)
        for of_rank, r in zip(received, residuals, strict=True)
    ]
    return codec.decode_flat(torch.stack(means), n, part, spec)


def snr_figures(grads: list[Tensor]) -> dict[str, dict[str, float]]:
    """Signal to noise of the means, in dB over all parameters together, and the shares that underflow."""
    exact = torch.cat([values.double().mean(0) for values in grads])

    def snr_db(mean: Callable[[Tensor], Tensor]) -> float:
        return measure.sqnr_db(exact, torch.cat([mean(values) for values in grads]))

    own = snr_db(lambda values: reduced(values, WIRE))
    found = {}
    for name, in_ring in SUMS.items():
        for kind in Scaling:
            found[name, kind] = snr_db(lambda values, kind=kind, in_ring=in_ring: _settled(values, kind, in_ring)[0])
    flushed = {kind: _flushed(grads, kind) for kind in Scaling}
    ring = max(found["FP8 ring", kind] for kind in Scaling)
    auto, post = found["FP32 sum", Scaling.AUTO], found["FP32 sum", Scaling.POST]
    figures = {
        "reduction of 64 ranks' gradients: SNR of ours above the best FP8 ring, dB": (own - ring, 10.0),
        "reduction of 64 ranks' gradients: SNR of auto- above post-scaling, FP32 sum, dB": (auto - post, 15.0),
        "reduction of 64 ranks' gradients: underflow of pre- less that of auto-scaling, % of values": (
            100 * (flushed[Scaling.PRE] - flushed[Scaling.AUTO]), LEAST_DIFFERENCE,
        ),
        "reduction of 64 ranks' gradients: underflow of auto- less that of post-scaling, % of values": (
            100 * (flushed[Scaling.AUTO] - flushed[Scaling.POST]), LEAST_DIFFERENCE,
        ),
    }  # fmt: skip
    fed, unfed = summed_snrs_db(grads)
    name = f"gradients in 4 bits: SNR of the sum of {RANKS // FEEDBACK_RANKS} steps, error feedback above none, dB"
    figures[name] = (fed - unfed, 10.0)
    raw = {f"{name}, {kind.name.lower()}": value for (name, kind), value in found.items()}
    raw |= {f"underflow, {kind.name.lower()}": share for kind, share in flushed.items()}
    for label, value in {"ours": own, "4 bits, fed": fed, "4 bits": unfed, **raw}.items():
        print(f"{label:<24} {value:.5f}")
    return {name: {"measured": value, "at_least": least} for name, (value, least) in figures.items()}


def _settled(values: Tensor, kind: Scaling, in_ring: bool) -> tuple[Tensor, Fp8LmReduction]:
    """The mean once mu has followed these gradients, and the reduction after it."""
    reduction = Fp8LmReduction(kind, len(values))
    for _ in range(AUTO_STEPS if kind is Scaling.AUTO else 0):
        reduction.mean_of(values, in_ring)
    return reduction.mean_of(values, in_ring), reduction


def _flushed(grads: list[Tensor], kind: Scaling) -> float:
    """The share of values that are not zero and leave a rank as code 0."""
    flushed = values = 0
    for rows in grads:
        mu = _settled(rows, kind, in_ring=False)[1].mu
        scale = scaling.quant_scale_of(kernels.amax(rows), E4M3FN, scaling.CURRENT) * mu
        count = kernels.quantize(rows, scale, E4M3FN, count=True).flushed
        assert count is not None
        flushed, values = flushed + int(count), values + int((rows != 0).sum())
    return flushed / values


def cost_figures(repeats: int) -> tuple[dict[str, dict[str, float]], dict[str, list[float]]]:
    """Seconds of the arithmetic of a reduction over those of gloo's all-reduce: the median, and all rounds."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results: Any = context.SimpleQueue()
        arguments = (f"{folder}/store", COST_VALUES, repeats, results)
        processes = [context.Process(target=_time_rank, args=(rank, *arguments)) for rank in range(2)]
        for process in processes:
            process.start()
        times = results.get()
        for process in processes:
            process.join()
    ratio = median(times["quantize, sum, dequantize"]) / median(times["gloo"])
    name = "quantize, sum and dequantize 64 MiB of gradients on a CPU, over gloo's float32 all-reduce, 2 ranks"
    for what, seconds in times.items():
        print(f"{what}: {1e3 * median(seconds):.1f} ms ({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f})")
    return {name: {"measured": ratio, "at_most": 0.8}}, times


def _time_rank(rank: int, store: str, length: int, repeats: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    values = torch.randn(length, generator=torch.Generator().manual_seed(rank))
    reduced, half = values.clone(), length // 2
    # into memory that is there already, as gloo's array is
    rows = codec.encode_flat(values, 2, half, WIRE)
    mean = codec.reduce_and_encode(rows, half, WIRE, 2)

    def arithmetic() -> None:
        codec.encode_flat(values, 2, half, WIRE, out=rows)
        # this rank's half of both: the bytes of the other rank's half would be as many
        codec.reduce_and_encode(rows, half, WIRE, 2, out=mean)
        codec.decode_flat(rows, length, half, WIRE, out=reduced)

    runs = {"gloo": lambda: dist.all_reduce(reduced), "quantize, sum, dequantize": arithmetic}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(repeats + 2):
        for name, run in runs.items():
            dist.barrier()
            begin_s = time.perf_counter()
            run()
            slower = torch.tensor(time.perf_counter() - begin_s)
            dist.all_reduce(slower, dist.ReduceOp.MAX)
            if round_ >= 2:
                times[name].append(slower.item())
        reduced.copy_(values)  # or the sums of many rounds overflow
    if rank == 0:
        results.put(times)
    dist.destroy_process_group()


def feedback_loss(job: tuple[str, int, int]) -> float:
    """Validation loss of (how the gradients travel, seed, steps): FP32, 4 bits, or 4 bits with feedback."""
    kind, seed, steps = job
    torch.set_num_threads(1)
    model, optimizers = reference.build(PLAIN, seed)
    text, batches = reference.load_text(), torch.Generator().manual_seed(1000 + seed)
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    feedback = [ErrorFeedback() for _ in range(FEEDBACK_RANKS)] if kind == FED else None
    for step in range(steps):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = reference.learning_rate(step, steps)
        ids, targets = reference.sample(text[: len(text) * 9 // 10], BATCH, batches)
        rows = []
        for part in zip(ids.chunk(FEEDBACK_RANKS), targets.chunk(FEEDBACK_RANKS), strict=True):
            model.zero_grad()
            model(*part)[1].backward()
            rows.append(torch.cat([_grad(p).flatten() for p in parameters]))
        mean = torch.stack(rows).mean(0) if kind == FP32_LABEL else reduced(rows, BITS_4, feedback)
        for p, values in zip(parameters, mean.split(sizes), strict=True):
            p.grad = values.view_as(p).clone()
        ng.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
    return reference.validation_loss(model, text[len(text) * 9 // 10 :])


def summed_snrs_db(grads: list[Tensor]) -> tuple[float, float]:
    """SNR of the sum over steps of means in 4 bits, in dB: with error feedback, and without.

    grads: of every parameter, one row a batch; each step takes as many as there are ranks.
    """
    rows = torch.cat(grads, dim=1)
    steps = rows.view(-1, FEEDBACK_RANKS, rows.shape[1])
    feedback = [ErrorFeedback() for _ in range(FEEDBACK_RANKS)]
    exact = steps.double().mean(1).sum(0)
    fed, unfed = (torch.stack([reduced(step, BITS_4, f) for step in steps]).sum(0) for f in (feedback, None))
    return measure.sqnr_db(exact, fed), measure.sqnr_db(exact, unfed)


def feedback_figures(
    seeds: int, steps: int, workers: int
) -> tuple[dict[str, dict[str, float]], dict[str, list[float]]]:
    """Mean validation losses above those of float32 gradients, and all losses."""
    jobs = [(kind, seed, steps) for kind in (FP32_LABEL, UNFED, FED) for seed in range(seeds)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        losses = pool.map(feedback_loss, jobs, chunksize=1)
    by_kind = {kind: [loss for (k, *_), loss in zip(jobs, losses, strict=True) if k == kind] for kind, *_ in jobs}
    means = {kind: fmean(values) for kind, values in by_kind.items()}
    figures = {
        f"validation loss of gradients that travel in {kind}, above FP32's": {
            "measured": means[kind] - means[FP32_LABEL], "at_most": reference.ALLOWED_LOSS_GAP,
        }
        for kind in (UNFED, FED)
    }  # fmt: skip
    return figures, by_kind


def main() -> int:
    """Measure, print the table; exit 1 where a figure misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["snr", "cost", "feedback"], default=["snr", "cost", "feedback"])
    parser.add_argument("--repeats", type=int, default=15, help="rounds of the cost")
    reference.add_options(parser)
    parser.set_defaults(steps=200)
    arguments = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    record: dict[str, Any] = {"text_sha256": reference.text_sha256()}
    if "cost" in arguments.parts:
        found, record["seconds"] = cost_figures(arguments.repeats)
        figures |= found
    torch.set_num_threads(1)
    if "snr" in arguments.parts:
        figures |= snr_figures(gradients())
    if "feedback" in arguments.parts:
        found, record["losses"] = feedback_figures(arguments.seeds, arguments.steps, arguments.workers)
        figures |= found
    rows = [
        [name, goal(figure), f"{figure['measured']:.3f}", "ok" if is_met(figure) else "MISSED"]
        for name, figure in figures.items()
    ]
    print(common.table(["figure", "goal", "measured", ""], rows))
    if arguments.json:
        print(common.write_result("reduction", {"figures": figures, **record}))
    return int(not all(map(is_met, figures.values())))


if __name__ == "__main__":
    raise SystemExit(main())

"""Data parallelism on two processes: bytes of the gradients on the loopback interface, and memory for gradients.

    python benchmarks/communication.py [--preset gpt-125m] [--memory-preset gpt-350m] [--no-memory] [--json]

Bytes: what the interface sends in a backward of a GPT (batch 1 x 16 a rank), headers of packets included. fp32 and bf16
are torch's DistributedDataParallel, bf16 by a hook that casts the buckets; ours is `data_parallel` and, for models that
DDP has wrapped, the hook that `prepare` registers.

Memory: of one rank beyond parameters and optimizer state, in its second step (batch 1 x 8), a parameter: storages of
all tensors after backward; and the most resident memory from before forward until after backward, activations and the
gradients that autograd makes included. Those of a tied embedding are two of float32 at once, in a process that trains
alone, too: the goal is for a vocabulary of 8192, and the preset's own is reported beside what one process takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import common
import loopback
import memory
import torch
import torch.distributed as dist
from tables import goal, is_met
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.distributed import data_parallel, wire
from narrowgauge.models.gpt import GPT
from narrowgauge.models.presets import preset

RANKS = 2
OURS, HOOK, ALONE = "narrow8", "narrow8, hook of DDP", "narrow8, one process"
VOCABULARY = 8192  # of the model whose memory is held to the goal
RUNS = ("fp32", "bf16", HOOK, OURS)
MOST_OF = {"fp32": 0.27, "bf16": 0.53}
MOST_BYTES = 1.5  # a parameter


def bf16_hook(state, bucket):  # torch's own refuses CPUs
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.bfloat16().div_(RANKS), async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))


def build(name: str, shape: str, **fields: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A replica and its optimizer."""
    model: nn.Module = GPT(preset(shape, **fields), generator=torch.Generator().manual_seed(0))
    if name != ALONE:
        model = data_parallel(model) if name == OURS else DistributedDataParallel(model)
    if name == "bf16":
        model.register_comm_hook(None, bf16_hook)  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return ng.prepare(model, optimizer, "narrow8") if name in (OURS, HOOK, ALONE) else (model, optimizer)


def ids_of(model: nn.Module, tokens: int) -> Tensor:
    inner: Any = getattr(model, "module", model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(inner.config.vocab_size, (1, tokens + 1), generator=generator)


def sent_bytes(name: str, shape: str) -> dict[str, Any]:
    """What loopback sends in the third backward: DDP lays its buckets out anew after the first."""
    model, _ = build(name, shape)
    ids = ids_of(model, 16)
    for _ in range(2):
        model(ids[:, :-1], ids[:, 1:])[1].backward()
        model.zero_grad()
    loss = model(ids[:, :-1], ids[:, 1:])[1]
    dist.barrier()
    before = loopback.sent_bytes()
    with wire.counted() as counted:
        loss.backward()
    dist.barrier()
    sent = loopback.sent_bytes() - before
    rows = {f"{row.collective} {row.dtype}": row.bytes for row in counted.rows}
    return {"loopback_bytes": sent, "counted_bytes_of_a_rank": rows, "parameters": parameters_of(model)}


def parameters_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def memory_of(name: str, shape: str, vocabulary: int) -> dict[str, Any]:
    """Bytes of a rank beyond parameters and optimizer state: storages after backward, and the peak of the process."""
    model, optimizer = build(name, shape, **({"vocab_size": vocabulary} if vocabulary else {}))
    ids = ids_of(model, 8)
    for step in range(2):
        if step == 1:
            memory.settle()
            kept = storage_bytes()
            before = memory.resident_bytes()
            Path("/proc/self/clear_refs").write_text("5")  # the most that it had begins anew
        model(ids[:, :-1], ids[:, 1:])[1].backward()
        if step == 1:
            peak = memory.resident_bytes("VmHWM") - before
            gc.collect()
            storages = storage_bytes() - kept
        optimizer.step()
        optimizer.zero_grad()
    count = parameters_of(model)
    return {"parameters": count, "storages": storages / count, "peak": peak / count}


def storage_bytes() -> int:
    """Of all tensors that Python knows, each storage once."""
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # isinstance would wake deprecated objects
            parts = (thing.codes, thing.dequant_scale) if isinstance(thing, ng.QuantizedTensor) else (thing,)
            for part in (*parts, *((thing.grad,) if thing.is_leaf and thing.grad is not None else ())):
                if not isinstance(part, ng.QuantizedTensor):
                    found[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(found.values())


def rank_main(kind: str, name: str, shape: str, vocabulary: int, rank: int, store: str) -> int:
    torch.set_num_threads(1)
    limit = timedelta(minutes=20)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=limit)
    found = sent_bytes(name, shape) if kind == "bytes" else memory_of(name, shape, vocabulary)
    dist.barrier()
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
    return 0


def on_ranks(kind: str, name: str, shape: str, vocabulary: int = 0) -> dict[str, Any]:
    """What rank 0 of fresh processes finds."""
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            [sys.executable, __file__, "--rank", kind, name, shape, str(vocabulary), str(rank), f"{folder}/store"]
            for rank in range(RANKS)
        ]
        environment = memory.environment()
        ranks = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True, env=environment) for c in commands]
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{kind} of {name}: a process failed")
    return json.loads(outputs[0].splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt-125m")
    parser.add_argument("--memory-preset", default="gpt-350m")
    parser.add_argument("--no-bytes", action="store_true")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    parser.add_argument("--rank", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        kind, name, shape, vocabulary, rank, store = arguments.rank
        return rank_main(kind, name, shape, int(vocabulary), int(rank), store)
    loopback.run_alone()
    figures: dict[str, dict[str, float]] = {}
    result: dict[str, Any] = {"own_loopback": loopback.is_alone(), "figures": figures}
    if not arguments.no_bytes:
        result["backward"] = found = {name: on_ranks("bytes", name, arguments.preset) for name in RUNS}
        rows = []
        for name, run in found.items():
            size = run["loopback_bytes"]
            rows.append([name, f"{size / 1e6:.1f}", f"{size / RANKS / run['parameters']:.3f}"])
        print(common.table([arguments.preset, "loopback MB", "bytes a parameter and rank"], rows))
        for ours in (OURS, HOOK):
            for name, most in MOST_OF.items():
                ratio = found[ours]["loopback_bytes"] / found[name]["loopback_bytes"]
                figures[f"bytes of a gradient reduction, {arguments.preset}: {ours} / DDP in {name}"] = {
                    "measured": ratio, "at_most": most
                }  # fmt: skip
    if not arguments.no_memory:
        shape = arguments.memory_preset
        small = f"{shape} with {VOCABULARY} tokens"
        runs = {f"{OURS}, {small}": on_ranks("memory", OURS, shape, VOCABULARY)}
        runs |= {f"{name}, {arguments.preset}": on_ranks("memory", name, arguments.preset) for name in (OURS, ALONE)}
        result["memory"] = runs
        rows = [[name, f"{run['storages']:.3f}", f"{run['peak']:.3f}"] for name, run in runs.items()]
        print(common.table(["bytes a parameter", "storages after backward", "peak of the process"], rows))
        for name, what in (("storages", "storages after backward"), ("peak", "peak of the process")):
            figures[f"bytes a parameter beyond parameters and optimizer state, {small}: {what}"] = {
                "measured": runs[f"{OURS}, {small}"][name], "at_most": MOST_BYTES
            }  # fmt: skip
    for name, figure in figures.items():
        print(f"{name:100} {figure['measured']:.3f}  {goal(figure)}  {'met' if is_met(figure) else 'missed'}")
    if arguments.json:
        print(common.write_result("communication", result))
    return 0 if all(map(is_met, figures.values())) else 1


if __name__ == "__main__":
    sys.exit(main())

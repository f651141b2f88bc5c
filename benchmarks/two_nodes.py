"""Data-parallel steps over a slow link: gradients in 8 bits against gradients in bfloat16.

    sudo python benchmarks/two_nodes.py [--rate 200mbit] [--repeats 10] [--json]

Two network namespaces on this machine stand for two nodes; each end of the link between them sends at most that rate,
see `namespaces.py`, which says what it needs (root). On each node one process trains a GPT of 20M parameters on 4 x 128
tokens by narrow8, with gradients averaged in three ways, steps interleaved: in the recipe's 8 bits; the same with
grad_comm=CastSpec(BF16); and plain PyTorch: float32 parameters, autocast to bfloat16, DDP with a hook that sends
bfloat16, fused AdamW. A step is forward, backward with the reduction, and the optimizer; its seconds are those of node
0, its bytes what left node 0's interface, headers included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import common
import namespaces
import torch
import torch.distributed as dist
from tables import goal, is_met
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import narrowgauge as ng
from narrowgauge.models.gpt import GPT
from narrowgauge.models.presets import preset

OURS, OURS_BF16, DDP_BF16 = "narrow8", "narrow8, gradients in bf16", "torch DDP, bf16 hook"
SHAPE = {"layers": 5, "width": 512, "heads": 8, "kv_heads": 8, "context": 128}  # of `tiny`'s kind: 20.3M parameters
BATCH, TOKENS = 4, 128
PORT = 29511
LEAST_RATIO = 1.6
WARMUP = 2
Step = Callable[[Tensor, Tensor], None]


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool) -> Step:
    def step(ids: Tensor, targets: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = model(ids, targets)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def bf16_hook(group: Any, bucket):  # DDP refuses annotations as strings
    """torch's own bf16_compress_hook, which refuses CPUs."""
    sent = bucket.buffer().bfloat16().div_(dist.get_world_size(group))
    work = dist.all_reduce(sent, group=group, async_op=True)
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


def contenders() -> dict[str, Step]:
    """The three, on this rank, with the same weights."""

    def model() -> GPT:
        return GPT(preset("tiny", **SHAPE), generator=torch.Generator().manual_seed(0))

    found: dict[str, Step] = {}
    for name, changes in ((OURS, {}), (OURS_BF16, {"grad_comm": ng.CastSpec(ng.formats.BF16)})):
        ours = ng.distributed.data_parallel(model())
        optimizer = AdamW(ours.parameters(), lr=1e-4)
        found[name] = stepper(*ng.prepare(ours, optimizer, ng.recipe("narrow8", **changes)), autocast=False)
    theirs = DistributedDataParallel(model())
    theirs.register_comm_hook(dist.group.WORLD, bf16_hook)
    found[DDP_BF16] = stepper(theirs, AdamW(theirs.parameters(), lr=1e-4, fused=True), autocast=True)
    return found


def work(rank: int, address: str, interface: str, repeats: int, result: str) -> None:
    """One node's process: interleaved steps, their seconds and bytes; node 0 writes them to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=2)
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    steps = contenders()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, list[int]] = {name: [] for name in steps}
    generator = torch.Generator().manual_seed(rank)
    vocabulary = preset("tiny").vocab_size
    for round_ in range(WARMUP + repeats):
        window = torch.randint(vocabulary, (BATCH, TOKENS + 1), generator=generator)
        for name, step in steps.items():
            dist.barrier()
            before, begin_s = int(counter.read_text()), time.perf_counter()
            step(window[:, :-1], window[:, 1:])
            if round_ >= WARMUP:
                seconds[name].append(time.perf_counter() - begin_s)
                sent[name].append(int(counter.read_text()) - before)
    if rank == 0:
        Path(result).write_text(json.dumps({"seconds": seconds, "sent_bytes": sent}))
    dist.barrier()
    dist.destroy_process_group()


def measure(rate: str, repeats: int) -> dict[str, Any]:
    """What node 0 found: seconds and bytes of every step."""
    with namespaces.two_nodes(rate) as nodes, tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        processes = []
        for rank, node in enumerate(nodes):
            words = [str(rank), nodes[0].address, node.interface, str(repeats), str(result)]
            command = node.command([sys.executable, __file__, "--worker", *words])
            processes.append(subprocess.Popen(command, env={**node.environment(), "OMP_NUM_THREADS": "1"}))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"the nodes' processes ended with {codes}")
        return json.loads(result.read_text())


def main() -> int:
    """Print seconds and bytes a step, write the result file with --json; exit 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit", help="of the link, as tc writes it")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        rank, address, interface, repeats, result = arguments.worker
        work(int(rank), address, interface, int(repeats), result)
        return 0
    if reason := namespaces.missing():
        print(f"skipped: no two nodes on this machine: {reason}")
        return 0
    found = measure(arguments.rate, arguments.repeats)
    steps_s = common.medians(found["seconds"])
    sent = common.medians(found["sent_bytes"])
    rows = [[name, f"{seconds:.3f}", f"{sent[name] / 1e6:.2f}"] for name, seconds in steps_s.items()]
    print(common.table([f"{arguments.rate} link", "s a step", "MB sent a step"], rows))
    figures = {
        f"step over a {arguments.rate} link, 20M parameters: {name} / {OURS}": {
            "measured": steps_s[name] / steps_s[OURS], "at_least": LEAST_RATIO,
        }
        for name in (OURS_BF16, DDP_BF16)
    }  # fmt: skip
    for label, figure in figures.items():
        print(f"{label}: {figure['measured']:.3f}, goal {goal(figure)}  {'ok' if is_met(figure) else 'MISSED'}")
    if arguments.json:
        print(common.write_result("two_nodes", {"figures": figures, **found}))
    return int(not all(is_met(figure) for figure in figures.values()))


if __name__ == "__main__":
    sys.exit(main())

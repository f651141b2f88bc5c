"""A large GPT on many ranks that are not there: what each of them holds, and what it sends in a step.

    python benchmarks/simulation.py [--preset gpt-175b] [--data 1] [--shard 128] [--tensor 8] [--rank 0] [--json]

One process is rank `--rank` of data x shard x tensor ranks of a process group that sends nothing; its tensors have
shapes but no memory. It builds the model, parts and shards it, prepares it by `--recipe`, and takes one step on one
sequence of the model's context: the real code of narrowgauge.distributed, whose collectives count what they would send.
Bytes are those that an ideal algorithm sends from this rank, see `narrowgauge.distributed.wire`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import common
import torch
from tables import goal, is_met

import narrowgauge as ng
from narrowgauge.distributed import wire
from narrowgauge.distributed.simulation import simulated_ranks, without_values
from narrowgauge.models.gpt import GPT
from narrowgauge.models.presets import preset, preset_names
from narrowgauge.observe.ledger import SavedActivations

MOST_SECONDS, MOST_GIB = 120.0, 4.0
Found = dict[str, Any]


def simulate(shape: str, recipe: str, sizes: dict[str, int], rank: int) -> Found:
    """Parameters, what one rank holds, the collectives of its step, and the seconds of each part."""
    seconds = {"build": time.perf_counter()}
    with simulated_ranks(sizes["data"] * sizes["shard"] * sizes["tensor"], rank):
        layout = ng.distributed.layout(**sizes, device_type="cpu")
        model = GPT(preset(shape), device="meta")
        parameters = model.parameter_count()
        ng.distributed.parallelize_tensor(model, layout, sequence=True)
        if sizes["shard"] > 1:
            ng.distributed.shard(model, layout)
        else:
            ng.distributed.data_parallel(model, layout)
        seconds["prepare"] = time.perf_counter()
        with without_values(model, layout):
            model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
            seconds["step"] = time.perf_counter()
            ids = torch.zeros(1, preset(shape).context, dtype=torch.int64)
            with wire.counted() as count:
                with SavedActivations(model) as saved:
                    loss = model(ids, ids)[1]
                loss.backward()
                ng.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            held = ng.ledger(model, optimizer, activation=saved.bytes).to_dict()
    end = time.perf_counter()
    starts = [*seconds.values(), end]
    return {
        "parameters": parameters,
        "sizes": sizes,
        "bytes": held["bytes"],
        "collectives": [{**row._asdict(), "dtype": str(row.dtype).removeprefix("torch.")} for row in count.rows],
        "seconds": {name: later - begin for (name, begin), later in zip(seconds.items(), starts[1:], strict=True)},
        "peak_gib": peak_gib(),
    }


def peak_gib() -> float:
    """The most resident memory that this process had, torch and all."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 2**20
    raise SystemExit("/proc/self/status has no VmHWM: this benchmark needs Linux")


def main() -> int:
    """Print both tables, write the result file with --json; exit 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=preset_names(), default="gpt-175b")
    parser.add_argument("--recipe", choices=ng.recipe_names(), default="narrow8")
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--shard", type=int, default=128)
    parser.add_argument("--tensor", type=int, default=8)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()
    begin_s = time.perf_counter()
    sizes = {name: getattr(arguments, name) for name in ("data", "shard", "tensor")}
    found = simulate(arguments.preset, arguments.recipe, sizes, arguments.rank)
    took_s = time.perf_counter() - begin_s
    ranks = arguments.data * arguments.shard * arguments.tensor
    what = f"{arguments.preset} on {ranks} simulated ranks"
    print(f"{what}, {arguments.recipe}: {found['parameters']:,} parameters; rank {arguments.rank}, {json.dumps(sizes)}")
    print(common.table(["held", "bytes"], [[role, f"{size:,}"] for role, size in found["bytes"].items()]))
    rows = [
        [row["role"], row["collective"], row["dtype"], f"{row['calls']:,}", f"{row['bytes']:,}"]
        for row in found["collectives"]
    ]
    print(common.table(["sent in a step", "collective", "dtype", "calls", "bytes"], rows))
    print(", ".join(f"{name} {seconds:.1f} s" for name, seconds in found["seconds"].items()))
    figures = {
        f"{what}: seconds": {"measured": took_s, "at_most": MOST_SECONDS},
        f"{what}: GiB of memory": {"measured": found["peak_gib"], "at_most": MOST_GIB},
    }
    for label, figure in figures.items():
        print(f"{label}: {figure['measured']:.2f}, goal {goal(figure)}  {'ok' if is_met(figure) else 'MISSED'}")
    if arguments.json:
        print(common.write_result("simulation", {"figures": figures, **found}))
    return int(not all(is_met(figure) for figure in figures.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Bytes of a whole FSDP2 step on the loopback interface: narrow8 against float32 and against bf16 mixed precision.

    python benchmarks/communication_fsdp.py [--steps 2] [--json]

Two gloo processes train a GPT of 8 blocks of width 512 with an embedding and a head of 8192 rows each; parameters are
gathered for forward and again for backward, gradients reduced, the optimizer steps. Float32 and bf16 (parameters,
gradients and their reduction) are torch's own fully_shard and AdamW. Gloo's reduce-scatter moves twice the bytes that
the operation needs, so each is run twice: with it, and with one made of an all-to-all, the ideal, which the goals are
against.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import common
import loopback
import torch
import torch.distributed as dist
from tables import goal, is_met
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import narrowgauge as ng
from narrowgauge.distributed import layout, shard
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT

RANKS = 2
CONFIG = GPTConfig(layers=8, width=512, heads=8, context=128, vocab_size=8192)
SEQUENCES, TOKENS = 2, 32
MOST_OF_FP32, MOST_OF_BF16 = 0.30, 0.55
POLICIES = {"fp32": MixedPrecisionPolicy(), "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
IDEAL = "ideal"
RUNS = (("narrow8", ""), *((name, reduction) for name in POLICIES for reduction in ("gloo", IDEAL)))


class IdealReduceScatter:
    """FSDP2's reduce-scatter by the bytes that it needs: every rank sends each other one its part."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(received.view(group.size(), -1).mean(0))


def train(name: str, reduction: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A sharded model and its optimizer."""
    model = GPT(CONFIG, device="cpu", generator=torch.Generator().manual_seed(0))
    if name == "narrow8":
        shard(model, layout(shard=RANKS))
        return ng.prepare(model, torch.optim.AdamW(model.parameters()), name)
    for block in model.blocks:
        fully_shard(block, mp_policy=POLICIES[name])
    fully_shard(model, mp_policy=POLICIES[name])
    for module in model.modules():
        if isinstance(module, FSDPModule) and reduction == IDEAL:
            module.set_custom_reduce_scatter(IdealReduceScatter())  # type: ignore[arg-type]
    return model, torch.optim.AdamW(model.parameters())


def measure(steps: int) -> dict[str, dict[str, Any]]:
    """Bytes of a step by run, e.g. "fp32 ideal": one rank's part of all runs, one after the other."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(CONFIG.vocab_size, (SEQUENCES, TOKENS + 1), generator=generator)
    found: dict[str, dict[str, Any]] = {}
    for name, reduction in RUNS:
        model, optimizer = train(name, reduction)

        def step(model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(ids[:, :-1], ids[:, 1:])[1].backward()
            optimizer.step()
            optimizer.zero_grad()

        found[f"{name} {reduction}".strip()] = loopback.figures_of(*loopback.of_a_step(step, steps), steps)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="steps that are counted")
    parser.add_argument("--json", action="store_true", help="write a file into benchmarks/results")
    arguments = parser.parse_args()
    loopback.run_alone()
    found = loopback.on_ranks(RANKS, measure, arguments.steps)
    parameters = GPT(CONFIG, device="meta").parameter_count()
    ours = found["narrow8"]["loopback_bytes"]
    goals = {"fp32 ideal": MOST_OF_FP32, "bf16 ideal": MOST_OF_BF16}
    figures, rows = {}, []
    for name, figure in found.items():
        ratio, sent = ours / figure["loopback_bytes"], figure["loopback_bytes"]
        row = [name, f"{sent / 1e6:.1f}", f"{sent / RANKS / parameters:.2f}", f"{ratio:.3f}", "", ""]
        if name in goals:
            figures[f"bytes of an FSDP2 step on loopback: narrow8 / {name}"] = {
                "measured": ratio, "at_most": goals[name]
            }  # fmt: skip
            met = figures[f"bytes of an FSDP2 step on loopback: narrow8 / {name}"]
            row[-2:] = [goal(met), "met" if is_met(met) else "missed"]
        rows.append(row)
    print(common.table(["run", "loopback MB", "bytes a parameter and rank", "narrow8 / it", "goal", ""], rows))
    if arguments.json:
        result = {"figures": figures, "own_loopback": loopback.is_alone(), "parameters": parameters, "of_a_step": found}
        print(common.write_result("communication_fsdp", result))
    return 0 if all(map(is_met, figures.values())) else 1


if __name__ == "__main__":
    sys.exit(main())

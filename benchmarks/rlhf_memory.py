"""Bytes of the four models of PPO: policy, value, reference and reward model, each of SmolLM2-135M's shape.

    python benchmarks/rlhf_memory.py [--recipes fp8_lm_o2 narrow8] [--shape smollm2-135m] [--json]

Baseline: float32 weights, gradients and Adam moments of policy and value model, bfloat16 weights of the two frozen
models. Against it each recipe, by the same PPOTrainer: one real step on short prompts, its storages counted by
`ng.ledger` within the optimizers' steps, where gradients and moments are there. Weights are random: bytes do not depend
on them. The trainers are built one after the other, in this process.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from typing import Any

import common
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.observe.ledger import Ledger
from narrowgauge.train.ppo import PPOConfig, PPOTrainer, ValueHead

# name -> fields of transformers' LlamaConfig. SmolLM2-135M: huggingface.co/HuggingFaceTB/SmolLM2-135M, config.json
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    },
    "tiny": {
        "vocab_size": 1024, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1,
    },
}  # fmt: skip
BASELINE = "baseline"
MODELS = ("policy", "value", "reference", "reward")
# of the baseline's, per recipe
SAVED_WEIGHTS = {"fp8_lm_o2": 0.46}
SAVED_STATES = {"fp8_lm_o2": 0.62}
ALL_IN = {"narrow8": 0.45}
NO_STATES = ("param", "grad", "buffer", "scaling")
PROMPT_TOKENS, NEW_TOKENS, SEQUENCES = 8, 4, 2


def language_model(shape: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SHAPES[shape], max_position_embeddings=64, tie_word_embeddings=True))


def trainer_of(contender: str, shape: str) -> PPOTrainer:
    """The four models by a recipe, or as the baseline keeps them."""
    torch.manual_seed(0)
    policy, reference = language_model(shape), language_model(shape)
    value, reward = (ValueHead(language_model(shape)) for _ in range(2))
    config = PPOConfig(max_new_tokens=NEW_TOKENS, epochs=1, micro_batch_size=SEQUENCES)
    if contender != BASELINE:
        return PPOTrainer(policy, value, reference, reward, recipe=contender, config=config)
    ng.prepare(reward, None, "bf16_pure")  # which stores bfloat16; it is never trained
    return PPOTrainer(policy, value, reference, reward, recipe="bf16", config=config, reference_recipe="bf16_pure")


def measure(contender: str, shape: str) -> dict[str, Ledger]:
    """Each model's ledger within one step."""
    trainer = trainer_of(contender, shape)
    found = trainer.ledgers()

    def count(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def counted(*_: Any) -> None:
            found[name] = ng.ledger(model, optimizer)

        optimizer.register_step_post_hook(counted)

    count("policy", trainer.policy.model, trainer.policy.optimizer)
    count("value", trainer.value.model, trainer.value.optimizer)
    vocabulary = SHAPES[shape]["vocab_size"]
    # the baseline's frozen models are narrower than its policy
    warnings.filterwarnings("ignore", message="the reference does not compute as the policy does")
    trainer.step([torch.randint(0, vocabulary, (PROMPT_TOKENS,)) for _ in range(SEQUENCES)])
    for name in ("policy", "value"):
        if not {"param", "grad", "exp_avg", "exp_avg_sq"} <= set(found[name].roles):
            raise SystemExit(f"{contender}: the step left no gradients and moments to count of the {name} model")
    return found


def sums(ledgers: dict[str, Ledger]) -> dict[str, int]:
    """Bytes of the four models together: weights, states, and all."""
    return {
        "weights": sum(each.roles["param"] for each in ledgers.values()),
        "states": sum(
            size for each in ledgers.values() for role, size in each.roles.items() if role not in NO_STATES
        ),
        "all": sum(each.total for each in ledgers.values()),
    }  # fmt: skip


def table_of(name: str, ledgers: dict[str, Ledger]) -> str:
    """Megabytes by model and role."""
    roles = list(dict.fromkeys(role for each in ledgers.values() for role in each.roles))
    rows = [
        [model, *(f"{ledgers[model].roles.get(role, 0) / 1e6:.1f}" for role in roles),
         f"{ledgers[model].total / 1e6:.1f}", f"{ledgers[model].per_parameter:.3f}"]
        for model in MODELS
    ]  # fmt: skip
    totals = [sum(each.roles.get(role, 0) for each in ledgers.values()) / 1e6 for role in roles]
    rows.append(["all", *(f"{total:.1f}" for total in totals), f"{sums(ledgers)['all'] / 1e6:.1f}", ""])
    return common.table([f"{name}, MB", *roles, "total", "bytes a parameter"], rows)


def figures(found: dict[str, dict[str, int]], shape: str) -> dict[str, dict[str, float]]:
    """Goals and what was measured, as the README's table reads them."""
    base, named = found[BASELINE], {}
    for recipe, its in found.items():
        if recipe in SAVED_WEIGHTS:
            named[f"RLHF, four models of {shape}: weights saved by {recipe}"] = {
                "measured": 1 - its["weights"] / base["weights"],
                "at_least": SAVED_WEIGHTS[recipe],
            }
        if recipe in SAVED_STATES:
            named[f"RLHF, four models of {shape}: optimizer states saved by {recipe}"] = {
                "measured": 1 - its["states"] / base["states"],
                "at_least": SAVED_STATES[recipe],
            }
        if recipe in ALL_IN:
            named[f"RLHF, four models of {shape}: weights, gradients and states, {recipe} / baseline"] = {
                "measured": its["all"] / base["all"],
                "at_most": ALL_IN[recipe],
            }
    return named


def is_met(figure: dict[str, float]) -> bool:
    return figure.get("at_least", float("-inf")) <= figure["measured"] <= figure.get("at_most", float("inf"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--recipes", nargs="+", choices=ng.recipe_names(), default=["fp8_lm_o2", "narrow8"])
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()
    totals, ledgers = {}, {}
    for contender in (BASELINE, *arguments.recipes):
        start = time.perf_counter()
        measured = measure(contender, arguments.shape)
        gc.collect()  # the models refer to themselves
        totals[contender] = sums(measured)
        ledgers[contender] = {name: each.to_dict() for name, each in measured.items()}
        print(table_of(contender, measured), f"\n({time.perf_counter() - start:.0f} s)\n", flush=True)
    found = figures(totals, arguments.shape)
    for name, figure in found.items():
        sign, bound = (">=", figure["at_least"]) if "at_least" in figure else ("<=", figure["at_most"])
        print(f"{name:90} {figure['measured']:.4f}  {sign} {bound:g}  {'ok' if is_met(figure) else 'MISSED'}")
    if arguments.json:
        print(common.write_result("rlhf_memory", {"ledgers": ledgers, "bytes": totals, "figures": found}))
    return int(not all(map(is_met, found.values())))


if __name__ == "__main__":
    raise SystemExit(main())

"""What the optimizer of a run holds."""

from __future__ import annotations

from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.train.assemble import build_optimizer
from narrowgauge.train.config import OptimizerConfig


def test_matrices_decay_and_vectors_do_not_also_where_experts_stack_them() -> None:
    config = GPTConfig(vocab_size=16, layers=1, width=16, heads=2, ffn_width=16, context=8, experts=3, mlp_bias=True)
    model = GPT(config.replace(norm="layernorm", norm_bias=True, attention_bias=True))
    groups = build_optimizer(model, OptimizerConfig(weight_decay=0.5)).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, kept = ({names[id(p)] for p in group["params"]} for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    experts = "blocks.0.mlp.experts"
    assert {f"{experts}.gate_up.weight", f"{experts}.down.weight", "blocks.0.mlp.router.weight"} < decayed
    assert {f"{experts}.gate_up.bias", f"{experts}.down.bias", "blocks.0.attention_norm.weight"} < kept
    assert all(name.endswith("bias") or "norm" in name for name in kept) and decayed | kept == set(names.values())

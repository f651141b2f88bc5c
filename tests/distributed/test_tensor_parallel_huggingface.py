"""Models of transformers by the built-in plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import run

import narrowgauge as ng
from narrowgauge.distributed import tensor_parallel, wire
from narrowgauge.errors import ConversionError

pytest.importorskip("transformers")
pytestmark = pytest.mark.multiproc

SIZES: dict[str, Any] = {
    "vocab_size": 65, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "attn_implementation": "eager",
}  # fmt: skip


def _model(name: str, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def _against_one(name: str) -> tuple[float, float, float, int, bool]:
    one = _model(name, tie_word_embeddings=name != "Llama")
    two = copy.deepcopy(one)
    tensor_parallel.parallelize_tensor(two, ng.distributed.layout(tensor=2))
    ids = torch.randint(65, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = one(input_ids=ids, labels=ids)
    expected.loss.backward()
    with wire.counted() as count:
        found = two(input_ids=ids, labels=ids)
        found.loss.backward()
    worst = 0.0
    for key, p in one.named_parameters():
        gradient = tensor_parallel.whole_gradient(two, key)
        assert gradient is not None and p.grad is not None, key
        worst = max(worst, float((gradient - p.grad).norm() / p.grad.norm()))
    sums = sum(row.calls for row in count.rows if row.collective == "all_to_all" and row.role == "activation_comm")
    same = torch.equal(one.generate(ids[:, :4], max_new_tokens=4), two.generate(ids[:, :4], max_new_tokens=4))
    return expected.loss.item(), found.loss.item(), worst, sums, same


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_loss_gradients_and_generation_are_those_of_one_process(name: str) -> None:
    for one, two, error, sums, same in run(2, _against_one, name, timeout_s=300):
        assert two == pytest.approx(one, rel=1e-5) and error < 1e-5 and same
        # embedding, head, and of each block two outputs, what q, k, v read and what gate and up read
        assert sums == 2 + 4 * 2


def _refused() -> tuple[str, str]:
    found = ng.distributed.layout(tensor=2)
    with pytest.raises(ConversionError) as heads:
        tensor_parallel.parallelize_tensor(_model("Llama", num_key_value_heads=1), found)
    with pytest.raises(ConversionError) as sequence:
        tensor_parallel.parallelize_tensor(_model("Llama"), found, sequence=True)
    return str(heads.value), str(sequence.value)


def test_heads_that_do_not_divide_and_parted_sequences_are_refused() -> None:
    heads, sequence = run(2, _refused, timeout_s=300)[0]
    assert "'model.layers.0.self_attn.k_proj': num_key_value_heads: 1 does not divide" in heads
    assert "sequence=True" in sequence

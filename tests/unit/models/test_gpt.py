import copy
import math

import pytest
import torch
import torch.nn.functional as F

from narrowgauge.errors import DataError, NarrowgaugeError
from narrowgauge.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=61, layers=2, width=32, heads=4, kv_heads=2, context=16)
VARIANTS = {
    "llama": CONFIG,
    "gpt2": CONFIG.replace(
        activation="gelu", norm="layernorm", norm_bias=True, positions="learned", attention_bias=True, mlp_bias=True
    ),
    "tied": CONFIG.replace(tied_embeddings=True),
    "mixture": CONFIG.replace(experts=4),
}


def make(config: GPTConfig, **kwargs) -> GPT:
    torch.manual_seed(0)
    return GPT(config, **kwargs)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 61, (3, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_few_steps_learn_one_batch(name, ids):
    model = make(VARIANTS[name])
    targets = ids.roll(-1, 1)
    logits, loss = model(ids, targets)
    assert logits.shape == (3, 16, 61) and loss.dtype is torch.float32
    assert abs(loss.item() - math.log(61)) < 0.1  # small initial weights: nearly uniform
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(ids, targets)[1]
        loss.backward()
        optimizer.step()
    assert loss.item() < 1.5
    assert all(p.grad is not None for p in model.parameters())


def test_loss_is_the_float32_cross_entropy_and_skips_ignored_targets(ids):
    model = make(CONFIG).to(torch.bfloat16)
    targets = ids.roll(-1, 1)
    targets[:, -3:] = -100
    logits, loss = model(ids, targets)
    assert logits.dtype is torch.bfloat16 and loss.dtype is torch.float32
    log_p = logits.float().log_softmax(-1)
    expected = -torch.stack([log_p[b, t, targets[b, t]] for b in range(3) for t in range(13)]).mean()
    torch.testing.assert_close(loss, expected)
    assert model(ids)[1] is None


def test_the_fused_projections_and_the_head_are_plain_linear_layers():
    model = make(CONFIG)
    linears = {name: tuple(m.weight.shape) for name, m in model.named_modules() if type(m) is torch.nn.Linear}
    assert linears["blocks.0.attention.qkv"] == ((4 + 2 * 2) * 8, 32)
    assert linears["blocks.1.mlp.gate_up"] == (2 * 128, 32)
    assert linears["lm_head"] == (61, 32)
    assert len(linears) == 2 * 4 + 1


@pytest.mark.parametrize("tokens", [17, 40])
def test_a_sequence_longer_than_the_context_is_refused(tokens):
    model = make(CONFIG)
    with pytest.raises(DataError, match=f"{tokens} tokens.*context is 16.*context={tokens}"):
        model(torch.zeros(1, tokens, dtype=torch.int64))
    with pytest.raises(DataError, match=r"shape \(4,\): expected \[batch, tokens\]"):
        model(torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("name", VARIANTS)
def test_activation_checkpointing_changes_no_bit(name, ids):
    plain = make(VARIANTS[name])
    recomputing = make(VARIANTS[name], activation_checkpointing=True)
    for model in (plain, recomputing):
        model(ids, ids)[1].backward()
    for a, b in zip(plain.parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a.grad, b.grad)


def test_activation_checkpointing_saves_less(ids):
    def saved_bytes(model: GPT) -> int:
        parameters = {p.data_ptr() for p in model.parameters()}
        sizes = {}

        def pack(tensor):
            if tensor.data_ptr() not in parameters:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(ids, ids)
        return sum(sizes.values())

    assert saved_bytes(make(CONFIG, activation_checkpointing=True)) < 0.5 * saved_bytes(make(CONFIG))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_compiles_without_a_graph_break_to_the_same_values(name, ids):
    model = make(VARIANTS[name])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected, loss = model(ids, ids)
    logits, compiled_loss = compiled(ids, ids)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    compiled_loss.backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    for a, p in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-6)


def test_the_tied_head_stays_the_embedding():  # case 55
    model = make(CONFIG.replace(tied_embeddings=True))
    for moved in (model, model.to(torch.bfloat16), copy.deepcopy(model), model.to_empty(device="meta")):
        assert moved.lm_head.weight is moved.embedding.weight
    moved = model.to_empty(device="cpu")
    moved.reset_parameters()
    assert moved.lm_head.weight is moved.embedding.weight
    names = [name for name, _ in moved.named_parameters()]
    assert "lm_head.weight" not in names and names.count("embedding.weight") == 1


def test_parameter_count_of_the_tied_llama_of_the_public_report():  # case 55
    config = GPTConfig(
        vocab_size=64, layers=2, width=32, heads=4, kv_heads=2, ffn_width=48, context=32, tied_embeddings=True
    )
    assert make(config).parameter_count() == 17568


def test_meta_parameters_refuse_a_real_batch_and_name_the_remedy(ids):  # case 113
    model = GPT(CONFIG, device="meta")
    with pytest.raises(NarrowgaugeError, match="meta device.*to_empty"):
        model(ids)
    assert model(ids.to("meta"))[0].shape == (3, 16, 61)  # shapes alone are fine


def test_learned_positions_and_rope_both_tell_positions_apart():
    for config in (CONFIG, CONFIG.replace(positions="learned")):
        model = make(config.replace(init_std=0.5))
        same = torch.zeros(1, 16, dtype=torch.int64)
        same[0, 0] = 1
        logits = model(same)[0][0]
        assert (logits[5] - logits[6]).abs().max() > 1e-4


def test_expresses_the_reference_model_of_the_parity_benchmark():
    config = GPTConfig(
        vocab_size=256, layers=3, width=96, heads=4, ffn_width=384, context=64, positions="learned", init_std=0.02
    )
    model = make(config)
    # two vocabulary tables, positions; per block qkv, out, gate_up, down and two norms; the last norm
    expected = 2 * 256 * 96 + 64 * 96 + 3 * (96 * 288 + 96 * 96 + 96 * 768 + 384 * 96 + 2 * 96) + 96
    assert model.parameter_count() == expected
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    torch.manual_seed(0)
    x = torch.randint(0, 256, (2, 64))
    assert abs(model(x, x)[1].item() - math.log(256)) < 0.1


def test_forward_equals_its_blocks_written_out(ids):
    model = make(VARIANTS["gpt2"].replace(init_std=0.2)).double()
    x = model.embedding.weight[ids] + model.positions.weight[:16]
    for block in model.blocks:
        x = x + block.attention(F.layer_norm(x, (32,), block.attention_norm.weight, block.attention_norm.bias), None)
        h = F.layer_norm(x, (32,), block.mlp_norm.weight, block.mlp_norm.bias)
        x = x + F.gelu(h @ block.mlp.up.weight.T + block.mlp.up.bias) @ block.mlp.down.weight.T + block.mlp.down.bias
    x = F.layer_norm(x, (32,), model.norm.weight, model.norm.bias)
    torch.testing.assert_close(model(ids)[0], x @ model.lm_head.weight.T)

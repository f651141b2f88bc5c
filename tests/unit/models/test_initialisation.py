import pytest
import torch

import narrowgauge as ng
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.rope import rope_tables

CONFIG = GPTConfig(vocab_size=512, layers=2, width=128, heads=4, context=64, tied_embeddings=True, experts=2)


@torch.no_grad()
def test_weights_have_the_asked_deviation_and_norms_are_one_also_after_a_second_reset():  # case 102
    torch.manual_seed(0)
    model = GPT(CONFIG.replace(norm="layernorm", norm_bias=True, attention_bias=True, mlp_bias=True))
    for _ in range(2):
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                assert not parameter.any(), name
            elif "norm" in name:
                assert (parameter == 1).all(), name
            elif parameter.numel() > 4096:
                assert abs(float(parameter.std()) - 0.02) < 0.001, name
                assert abs(float(parameter.mean())) < 1e-3, name
        before = model.embedding.weight.clone()
        model.reset_parameters()
        assert not torch.equal(before, model.embedding.weight)


@torch.no_grad()
def test_residual_projections_start_smaller_where_asked():
    torch.manual_seed(0)
    model = GPT(CONFIG.replace(experts=0, scaled_residual_init=True))
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            assert float(parameter.std()) == pytest.approx(0.01, rel=0.05)  # 0.02 / sqrt(2 * 2)
        elif parameter.dim() == 2:
            assert float(parameter.std()) == pytest.approx(0.02, rel=0.05)


def test_building_on_meta_and_materialising_equals_building_on_the_cpu():  # cases 102, 113
    torch.manual_seed(3)
    direct = GPT(CONFIG)
    with torch.device("meta"):
        model = GPT(CONFIG)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    torch.manual_seed(3)
    model.reset_parameters()
    for (name, a), (_, b) in zip(direct.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(model.rope.cos, rope_tables(64, 32, 10000.0)[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 512, (2, 64))
    for _ in range(2):
        loss = model(ids, ids)[1]
        loss.backward()
        optimizer.step()
        assert torch.isfinite(loss)


def test_loading_by_assignment_into_a_meta_model():  # case 113
    direct = GPT(CONFIG.replace(tied_embeddings=False))
    model = GPT(CONFIG.replace(tied_embeddings=False), device="meta")
    model.load_state_dict(direct.state_dict(), assign=True)
    ids = torch.randint(0, 512, (1, 64))
    assert torch.equal(model.eval()(ids)[0], direct.eval()(ids)[0])


def test_a_generator_makes_the_weights_independent_of_the_global_state():
    models = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        models.append(GPT(CONFIG, generator=torch.Generator().manual_seed(7)))
        assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_a_bf16_model_gets_the_float32_values_rounded():  # case 102
    wide = GPT(CONFIG, generator=torch.Generator().manual_seed(7))
    narrow = GPT(CONFIG, device="meta").to(torch.bfloat16).to_empty(device="cpu")
    narrow.reset_parameters(torch.Generator().manual_seed(7))
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert b.dtype is torch.bfloat16 and torch.equal(a.bfloat16(), b)


def test_layers_that_were_replaced_reset_their_own_state_without_disturbing_the_weights():  # cases 102, 113
    class Scaled(torch.nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            self.scale = 1.0

    model = GPT(CONFIG)
    layer = model.blocks[0].attention.qkv
    layer.__class__ = Scaled
    layer.scale = float("nan")
    model.reset_parameters(torch.Generator().manual_seed(7))
    assert layer.scale == 1.0
    expected = GPT(CONFIG, generator=torch.Generator().manual_seed(7))
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), model.parameters(), strict=True))
    torch.manual_seed(5)
    model.reset_parameters()
    torch.manual_seed(5)
    expected.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), model.parameters(), strict=True))


def test_a_converted_model_with_a_tied_head_is_drawn_as_a_plain_one():
    plain, converted = (
        GPT(CONFIG.replace(experts=0), generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)
    )
    ng.convert(converted, "bf16")
    assert type(converted.lm_head) is not type(plain.lm_head)
    converted.reset_parameters(torch.Generator().manual_seed(3))
    for name, p in plain.named_parameters():
        assert torch.equal(converted.get_parameter(name), p), name

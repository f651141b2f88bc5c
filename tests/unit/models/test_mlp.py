import pytest
import torch
import torch.nn.functional as F

from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT
from narrowgauge.models.mlp import MixtureOfExperts, balance_loss, make_mlp

CONFIG = GPTConfig(vocab_size=8, layers=2, width=16, heads=2, ffn_width=24, context=16, experts=4)


def make_mixture(config: GPTConfig) -> MixtureOfExperts:
    torch.manual_seed(0)
    mixture = MixtureOfExperts(config)
    torch.nn.init.normal_(mixture.router.weight, std=0.5)
    return mixture


def run_expert(mixture: MixtureOfExperts, expert: int, x: torch.Tensor) -> torch.Tensor:
    """One expert as the formula says, from its part of the fused weights."""
    gate, up = (x @ mixture.experts.gate_up.weight[expert].T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ mixture.experts.down.weight[expert].T


def every_expert_on_every_token(mixture: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """The dense reference: one token at a time, all experts, weights of the unchosen ones zero."""
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        p = torch.softmax(mixture.router.weight @ token, dim=0)
        chosen = sorted(range(len(p)), key=lambda e: -float(p[e].detach()))[: mixture.k]
        total = sum(p[e] for e in chosen) if mixture.k > 1 else 1.0
        rows.append(sum(p[e] / total * run_expert(mixture, e, token[None])[0] for e in chosen))
    return torch.stack(rows).view(x.shape)


def test_swiglu_and_gelu_equal_their_formulas():
    torch.manual_seed(0)
    x = torch.randn(5, 16)
    mlp = make_mlp(CONFIG.replace(mlp_bias=True))
    gate = x @ mlp.gate_up.weight[:24].T + mlp.gate_up.bias[:24]
    up = x @ mlp.gate_up.weight[24:].T + mlp.gate_up.bias[24:]
    y = (gate / (1 + (-gate).exp()) * up) @ mlp.down.weight.T + mlp.down.bias
    torch.testing.assert_close(mlp(x), y, rtol=1e-5, atol=1e-6)
    mlp = make_mlp(CONFIG.replace(activation="gelu"))
    h = x @ mlp.up.weight.T
    y = (h * 0.5 * (1 + torch.erf(h / 2**0.5))) @ mlp.down.weight.T
    torch.testing.assert_close(mlp(x), y, rtol=1e-5, atol=1e-6)


def test_clamped_swiglu_equals_its_formula():
    torch.manual_seed(0)
    mlp = make_mlp(CONFIG.replace(swiglu_limit=0.25))
    torch.nn.init.normal_(mlp.gate_up.weight)
    x = torch.randn(50, 16)
    gate, up = (x @ mlp.gate_up.weight.T).chunk(2, dim=-1)
    assert all((part.abs() > 0.25).any() and (part.abs() < 0.25).any() for part in (gate, up))
    gate = torch.where(gate > 0.25, 0.25, gate)  # from above only
    up = torch.where(up > 0.25, 0.25, torch.where(up < -0.25, -0.25, up))
    h = gate / (1 + (-gate).exp()) * up
    seen = []
    mlp.down.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    torch.testing.assert_close(mlp(x), h @ mlp.down.weight.T, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen[0], h, rtol=1e-5, atol=1e-6)
    assert seen[0].abs().max() <= 0.28 * 0.25  # silu is never below -0.2785


def test_experts_take_the_clamp_too():
    mixture = make_mixture(CONFIG.replace(swiglu_limit=1e-6))
    y, _ = mixture(torch.randn(2, 5, 16))
    assert 0 < y.abs().max() < 1e-6


@pytest.mark.parametrize("k", [1, 2, 4])
def test_mixture_equals_the_dense_loop_in_values_and_gradients(k):
    mixture = make_mixture(CONFIG.replace(experts_per_token=k))
    x = torch.randn(2, 9, 16, requires_grad=True)
    y, _ = mixture(x)
    expected = every_expert_on_every_token(mixture, x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn_like(y)
    parameters = [x, *mixture.parameters()]
    got = torch.autograd.grad((y * weight).sum(), parameters)
    want = torch.autograd.grad((expected * weight).sum(), parameters, materialize_grads=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_an_expert_without_tokens_has_zero_gradients_and_changes_nothing():  # case 96
    mixture = make_mixture(CONFIG.replace(experts_per_token=1))
    with torch.no_grad():  # all tokens are positive, so all go to expert 2
        mixture.router.weight.fill_(-1.0)[2].fill_(1.0)
    x = torch.rand(2, 5, 16) + 0.1
    y, _ = mixture(x)
    p = F.softmax(x @ mixture.router.weight.T, dim=-1)[..., 2:3]
    torch.testing.assert_close(y, p * run_expert(mixture, 2, x))
    y.sum().backward()
    for parameter in mixture.experts.parameters():
        assert parameter.grad is not None
        assert [bool(part.any()) for part in parameter.grad] == [False, False, True, False]


def test_no_tokens_at_all():  # case 96
    mixture = make_mixture(CONFIG)
    y, balance = mixture(torch.randn(0, 5, 16, requires_grad=True))
    assert y.shape == (0, 5, 16) and balance.item() == 0.0
    (y.sum() + balance).backward()
    assert all(p.grad is not None and not p.grad.any() for p in mixture.parameters())


def test_router_is_float32_whatever_surrounds_it():
    mixture = make_mixture(CONFIG)
    x = torch.randn(3, 16)
    expected = x.bfloat16().float() @ mixture.router.weight.T
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mixture.router(x.bfloat16()), expected)
        y, balance = mixture(x[None])
    assert (y.dtype, balance.dtype) == (torch.bfloat16, torch.float32)
    assert not [m for m in mixture.router.modules() if isinstance(m, torch.nn.Linear)]


def test_balance_loss_is_one_when_even_and_the_number_of_experts_when_all_go_to_one():
    even = torch.full((8, 4), 0.25)
    assert float(balance_loss(even, torch.tensor([4, 4, 4, 4]))) == 1.0
    one = torch.tensor([[1.0, 0, 0, 0]]).expand(8, 4)
    assert float(balance_loss(one, torch.tensor([8, 0, 0, 0]))) == 4.0


def test_balance_loss_is_added_in_training_only_with_its_coefficient():
    torch.manual_seed(0)
    model = GPT(CONFIG.replace(load_balancing=0.0))
    ids = torch.randint(0, 8, (2, 16))
    pure = model(ids, ids)[1].item()
    model.config = CONFIG.replace(load_balancing=0.5)
    trained = model(ids, ids)[1].item()
    # two blocks whose routers are nearly uniform: a balance of about 1
    assert 0.45 < trained - pure < 0.6
    assert model.eval()(ids, ids)[1].item() == pure

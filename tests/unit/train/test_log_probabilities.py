"""Log-probabilities, entropies and KL divergences against float64, torch.distributions and closed forms."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train import vocabulary
from narrowgauge.train.log_probabilities import (
    IGNORED,
    as_log_probs,
    completion_log_probs,
    entropy,
    implicit_rewards,
    importance_ratios,
    kl_estimate,
    masked_mean,
    sequence_log_probs,
    token_log_probs,
    vocabulary_kl,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def small_and_seeded(one_thread: None, seeded: None) -> None:
    """Applies to every test of this file."""


@pytest.fixture(params=[1 << 22, 40, 7], ids=["one chunk", "some tokens", "one token"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(vocabulary, "CHUNK_VALUES", request.param)
    return request.param


def gradient(value: Tensor, *inputs: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((value * weights.to(value.dtype)).sum(), inputs, retain_graph=True)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_are_those_of_float64_on_the_same_logits(chunk: int, dtype, temperature) -> None:
    logits = (torch.randn(3, 5, 17) * 3).to(dtype).requires_grad_()
    other = (torch.randn(3, 5, 17) * 3).to(dtype).requires_grad_()
    labels, weights = torch.randint(0, 17, (3, 5)), torch.randn(3, 5)
    wide, wide_other = (x.detach().double().requires_grad_() for x in (logits, other))
    p, q = (Categorical(logits=x / temperature) for x in (wide, wide_other))
    for found, expected, ours, theirs in (
        (token_log_probs(logits, labels, temperature=temperature), p.log_prob(labels), (logits,), (wide,)),
        (entropy(logits, temperature=temperature), p.entropy(), (logits,), (wide,)),
        (vocabulary_kl(logits, other, temperature=temperature), kl_divergence(p, q), (logits, other),
         (wide, wide_other)),
    ):  # fmt: skip
        assert found.dtype is torch.float32
        torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=2e-6)
        for mine, exact, x in zip(
            gradient(found, *ours, weights=weights), gradient(expected, *theirs, weights=weights), ours, strict=True
        ):
            assert mine.dtype is x.dtype
            # half a unit in the last place of the gradient's dtype, and float32's own error
            assert relative_error(mine, exact) <= torch.finfo(dtype).eps / 2 + 1e-5


def test_float64_stays_float64_and_passes_gradcheck() -> None:
    logits = (torch.randn(2, 3, 5, dtype=torch.float64) * 2).requires_grad_()
    close = (logits.detach() + 0.01 * torch.randn(2, 3, 5, dtype=torch.float64)).requires_grad_()
    labels = torch.tensor([[0, IGNORED, 4], [1, 2, 3]])
    assert token_log_probs(logits, labels).dtype is torch.float64
    assert torch.autograd.gradcheck(lambda x: token_log_probs(x, labels, temperature=0.5), (logits,))
    assert torch.autograd.gradcheck(lambda x: entropy(x, temperature=2.0), (logits,))
    assert torch.autograd.gradcheck(lambda x, y: vocabulary_kl(x, y, temperature=0.5), (logits, close))
    assert torch.autograd.gradcheck(lambda x, y: vocabulary_kl(x, y * 3), (logits, close))


@given(
    st.integers(2, 40), st.floats(0.01, 60), st.floats(0, 5), st.sampled_from(DTYPES), st.integers(0, 2**31)
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_what_holds_for_any_logits(size: int, scale: float, distance: float, dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(4, size, generator=generator) * scale).to(dtype)
    other = (logits.float() + distance * torch.randn(4, size, generator=generator)).to(dtype)
    every = torch.arange(size)[:, None].expand(size, 4)
    log_probs = token_log_probs(logits.expand(size, 4, size), every)
    torch.testing.assert_close(log_probs.double().exp().sum(0), torch.ones(4).double(), rtol=1e-5, atol=1e-5)
    assert (log_probs <= 0).all()
    h = entropy(logits)
    assert ((h >= -1e-5) & (h <= math.log(size) + 1e-5)).all()
    kl = vocabulary_kl(logits, other)
    expected = kl_divergence(Categorical(logits=logits.double()), Categorical(logits=other.double()))
    assert (kl >= 0).all()
    torch.testing.assert_close(kl.double(), expected, rtol=1e-3, atol=1e-6)
    assert (vocabulary_kl(logits, logits) == 0).all()


def test_what_is_ruled_out_counts_for_nothing() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]], requires_grad=True)
    other = torch.tensor([[0.5, 0.0, -math.inf]], requires_grad=True)
    two = vocabulary_kl(logits.detach()[:, :2], other.detach()[:, :2])
    kl = vocabulary_kl(logits, other)
    assert torch.equal(kl, two)
    assert float(entropy(logits.detach())) == pytest.approx(float(entropy(logits.detach()[:, :2])), rel=1e-6)
    for x in torch.autograd.grad(kl.sum() + entropy(logits).sum(), (logits, other)):
        assert x.isfinite().all() and x[0, 2] == 0
    # the reference may draw what the policy rules out, not the other way round
    assert vocabulary_kl(logits, other.nan_to_num(neginf=0.0)).isfinite().all()
    assert vocabulary_kl(other.nan_to_num(neginf=0.0), logits).isinf().all()


def test_kl_gradient_keeps_its_digits_where_policy_and_reference_are_close() -> None:  # case 110
    logits = (torch.randn(4, 32000) * 3).bfloat16()
    reference = (logits + 0.02 * torch.randn(4, 32000)).bfloat16()
    exact = [x.double().requires_grad_() for x in (logits, reference)]
    log_p, log_q = (x.log_softmax(-1) for x in exact)
    expected_kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    expected = torch.autograd.grad(expected_kl.sum(), exact)
    for dtype, allowed in ((torch.bfloat16, 0.01), (torch.float32, 2e-5)):
        ours = [x.detach().to(dtype).requires_grad_() for x in (logits, reference)]
        kl = vocabulary_kl(*ours)
        torch.testing.assert_close(kl.double(), expected_kl.detach(), rtol=1e-5, atol=0)
        for found, right in zip(torch.autograd.grad(kl.sum(), ours), expected, strict=True):
            assert relative_error(found, right) <= allowed
    naive = (logits.softmax(-1) - reference.softmax(-1)).double()
    assert relative_error(-naive, expected[1]) > 0.1  # what the test is about


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rewards_from_16_bit_logits_are_those_of_float64(dtype) -> None:  # case 104
    logits = (torch.randn(2, 512, 2048) * 30).to(dtype)
    reference = (logits + torch.randn(2, 512, 2048)).to(dtype)
    labels = torch.randint(0, 2048, (2, 512))
    mask = torch.arange(512)[None] < torch.tensor([[512], [100]])

    def exact(x: Tensor) -> Tensor:
        return x.double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    expected = 0.1 * ((exact(logits) - exact(reference)) * mask).sum(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = implicit_rewards(token_log_probs(logits, labels), token_log_probs(reference, labels), mask, beta=0.1)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-3)


def test_sums_of_16_bit_terms_do_not_stand_still() -> None:  # case 104
    terms = torch.full((2, 4096), -0.1, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = sequence_log_probs(terms)
    assert total.dtype is torch.float32
    assert total.tolist() == pytest.approx([-410.0, -410.0], abs=0.1)  # 4096 times bf16(-0.1) = -0.10009765625
    mask = torch.arange(4096)[None] < torch.tensor([[1024], [0]])
    terms[~mask] = math.nan
    assert sequence_log_probs(terms, mask).tolist() == pytest.approx([-102.5, 0.0], abs=1e-6)


def test_autocast_changes_no_bit() -> None:
    logits, other = ((torch.randn(2, 3, 50) * 5).requires_grad_() for _ in range(2))
    labels = torch.randint(0, 50, (2, 3))

    def all_of() -> list[Tensor]:
        values = [token_log_probs(logits, labels), entropy(logits), vocabulary_kl(logits, other)]
        values.append(kl_estimate(values[0], token_log_probs(other, labels), "k3"))
        return [*values, *torch.autograd.grad(sum(v.sum() for v in values), (logits, other))]  # type: ignore[arg-type]

    plain = all_of()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = all_of()
    assert all(torch.equal(a, b) and a.dtype is torch.float32 for a, b in zip(plain, inside, strict=True))


class Largest(TorchDispatchMode):
    """The most float32 values that one operation's output holds."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and x.dtype is torch.float32:
                self.values = max(self.values, x.numel())
        return out


def saved_bytes(function, *inputs: Tensor) -> int:
    """Bytes that autograd keeps beside the inputs."""
    seen = {x.untyped_storage().data_ptr() for x in inputs}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in seen:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function(*inputs)
    return sum(kept.values())


def test_no_wide_copy_of_the_logits_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_VALUES", 2000)
    logits, other = (torch.randn(2, 65, 500).bfloat16().requires_grad_() for _ in range(2))
    ids, mask = torch.randint(0, 500, (2, 65)), torch.ones(2, 65, dtype=torch.bool)
    for function in (
        lambda x, y: completion_log_probs(x, ids, mask),  # a slice of the logits
        lambda x, y: entropy(x),
        vocabulary_kl,
    ):
        with Largest() as largest:
            function(logits, other).sum().backward()
        assert 0 < largest.values <= 2000
        assert saved_bytes(function, logits, other) <= 2 * 65 * 4 * 5  # a few numbers a token


def test_completions_are_shifted_and_masked() -> None:
    logits = torch.randn(2, 4, 11, requires_grad=True)
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    mask = torch.tensor([[False, False, True, True], [False, True, False, False]])
    found = completion_log_probs(logits, ids, mask)
    log_p = logits.detach().log_softmax(-1)
    expected = [[0.0, float(log_p[0, 1, 3]), float(log_p[0, 2, 4])], [float(log_p[1, 0, 6]), 0.0, 0.0]]
    torch.testing.assert_close(found.detach(), torch.tensor(expected))
    (grad,) = torch.autograd.grad(found.sum(), logits)
    assert (grad.abs().sum(-1) > 0).tolist() == [[False, True, True, False], [True, False, False, False]]


def test_rows_that_count_for_nothing_may_hold_anything() -> None:
    logits = torch.randn(1, 3, 7)
    logits[0, 1] = math.nan
    logits.requires_grad_()
    found = token_log_probs(logits, torch.tensor([[1, IGNORED, 2]]))
    assert found.isfinite().all() and found[0, 1] == 0
    (grad,) = torch.autograd.grad(found.sum(), logits)
    assert grad.isfinite().all() and (grad[0, 1] == 0).all()


@pytest.mark.parametrize("d", [-3.0, -0.02, -0.0099, -1e-4, 0.0, 1e-6, 0.0099, 0.02, 4.0])
def test_kl_estimates_by_closed_form(d: float) -> None:
    new = torch.tensor([-1.0], dtype=torch.float32, requires_grad=True)
    old = torch.tensor([-1.0 - d])
    d = float(new.detach().double() - old.double())
    for name, expected, slope in (
        ("k1", d, 1.0),
        ("k2", d * d / 2, d),
        ("k3", math.expm1(-d) + d, -math.expm1(-d)),
    ):
        found = kl_estimate(new, old, name)
        assert float(found.detach()) == pytest.approx(expected, rel=2e-5, abs=1e-12)
        assert float(torch.autograd.grad(found.sum(), new)[0]) == pytest.approx(slope, rel=2e-5, abs=1e-12)


def test_kl_estimates_average_to_the_kl() -> None:
    logits = torch.randn(8)
    reference = logits + 0.3 * torch.randn(8)
    draws = torch.multinomial(logits.softmax(-1), 200_000, replacement=True)
    log_p, log_q = logits.log_softmax(-1)[draws], reference.log_softmax(-1)[draws]
    exact = float(vocabulary_kl(logits[None], reference[None]))
    for name in ("k1", "k3"):
        estimates = kl_estimate(log_p, log_q, name)
        error = float(estimates.std()) / math.sqrt(len(draws))
        assert float(estimates.mean()) == pytest.approx(exact, abs=4 * error)
    with pytest.raises(ConfigError, match="'k4': expected 'k1', 'k2' or 'k3'"):
        kl_estimate(log_p, log_q, "k4")  # type: ignore[arg-type]


def rollout() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield torch.randn(4, 16, generator=generator)


def test_missing_log_probs_have_ratio_1_and_no_gradient() -> None:  # case 108
    new, old, advantages = rollout()
    rows: list[list[float | None]] = [list(row) for row in old.tolist()]
    rows[1][3], rows[2][5] = math.nan, None
    mask = torch.ones(4, 16, dtype=torch.bool)
    mask[3, 8:] = False
    by_hand = mask.clone()
    by_hand[1, 3] = by_hand[2, 5] = False

    def grads(sampler, counted: Tensor) -> tuple[Tensor, Tensor]:
        x = new.clone().requires_grad_()
        found = importance_ratios(x, sampler, counted)
        assert found.invalid == int(counted.sum()) - int(by_hand.sum())
        assert torch.equal(found.mask, by_hand)
        loss = masked_mean(
            torch.minimum(found.ratios * advantages, found.ratios.clamp(0.8, 1.2) * advantages), found.mask
        )
        return found.ratios.detach(), torch.autograd.grad(loss, x)[0]

    ratios, found = grads(rows, mask)
    ratios_by_hand, expected = grads(old, by_hand)
    assert torch.equal(found, expected)
    assert torch.equal(ratios, ratios_by_hand)
    assert ratios[1, 3] == ratios[2, 5] == 1
    assert found[1, 3] == found[2, 5] == 0
    torch.testing.assert_close(ratios[by_hand], (new - old).exp()[by_hand])


def test_a_policy_that_is_nan_somewhere_hurts_nothing_else() -> None:
    new, old, _ = rollout()
    new[0, 0] = math.nan
    old[0, 1] = -math.inf
    x = new.requires_grad_()
    found = importance_ratios(x, old, torch.ones(4, 16, dtype=torch.bool))
    assert found.invalid == 2
    (grad,) = torch.autograd.grad(found.ratios.sum(), x)
    assert grad.isfinite().all() and grad[0, 0] == grad[0, 1] == 0


def test_rows_of_an_engine() -> None:
    found = as_log_probs([[-1.0, None], [], [-0.5]])
    assert found.shape == (3, 2) and found.dtype is torch.float32
    assert found.isnan().tolist() == [[False, True], [True, True], [False, True]]
    assert as_log_probs([], 4).shape == (0, 4)
    with pytest.raises(DataError, match="a row of 3 .*: expected at most 2"):
        as_log_probs([[0.0, 0.0, 0.0]], 2)


def test_wrong_input_is_named() -> None:
    logits = torch.randn(2, 3, 5)
    with pytest.raises(DataError, match=r"\[2, 3, 5\] and labels \[2, 2\]"):
        token_log_probs(logits, torch.zeros(2, 2, dtype=torch.long))
    with pytest.raises(DataError, match="label 5: expected 0 to 4"):
        token_log_probs(logits, torch.full((2, 3), 5))
    with pytest.raises(DataError, match="label -1: expected 0 to 4"):
        token_log_probs(logits, torch.full((2, 3), -1))
    with pytest.raises(DataError, match=r"\[2, 3, 4\].*share a vocabulary"):
        vocabulary_kl(logits, logits[..., :4])
    with pytest.raises(ConfigError, match="temperature=0"):
        entropy(logits, temperature=0)
    with pytest.raises(DataError, match=r"expected one shape \[B, T\]"):
        importance_ratios(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 2, dtype=torch.bool))

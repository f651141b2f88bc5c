"""Sequences parted over tensor-parallel ranks: gradients of norms, codes on the wire, what is kept for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, tiny_gpt
from ranks import run
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import narrowgauge as ng
from narrowgauge.distributed import tensor_parallel, wire
from narrowgauge.errors import ConversionError, DataError
from narrowgauge.models.gpt import GPT

pytestmark = pytest.mark.multiproc

LLAMA = {"heads": 4, "kv_heads": 2, "tied_embeddings": False}
GPT3 = {
    "positions": "learned", "norm": "layernorm", "norm_bias": True, "attention_bias": True, "mlp_bias": True,
    "activation": "gelu", "tied_embeddings": True, "vocab_size": 63,
}  # fmt: skip


def _parallel(model: nn.Module, **options: Any) -> nn.Module:
    found = ng.distributed.layout(tensor=dist.get_world_size())
    return ng.distributed.parallelize_tensor(model, found, sequence=True, **options)


def _worst(one: nn.Module, two: nn.Module) -> float:
    errors = []
    for name, p in one.named_parameters():
        gradient = tensor_parallel.whole_gradient(two, name)
        assert gradient is not None and p.grad is not None, name
        errors.append(((gradient - p.grad).norm() / p.grad.norm()).item())
    return max(errors)


def _parity(changes: dict[str, object]) -> tuple[float, float, float]:
    one, two = tiny_gpt(**changes), tiny_gpt(**changes)
    _parallel(two)
    ids, targets = (t.clamp(max=62) for t in batch(1))
    losses = []
    for model in (one, two):
        for _ in range(2):  # gradients add up
            _, loss = model(ids, targets)
            assert loss is not None
            loss.backward()
        losses.append(loss.item())
    return losses[0], losses[1], _worst(one, two)


@pytest.mark.parametrize(("ranks", "changes"), [(2, LLAMA), (2, GPT3), (4, {**LLAMA, "kv_heads": 4})])
def test_loss_and_gradients_in_float32_are_those_of_one_process(ranks: int, changes: dict[str, object]) -> None:
    for one, two, error in run(ranks, _parity, changes):
        assert two == pytest.approx(one, rel=1e-5) and error < 1e-5


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)
        self.last = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.down(self.up(self.first(x)).relu()))


def _block(recipe: str, parallel: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = _Block()
    if parallel:
        _parallel(model, plan={"up": "column", "down": "row"})
    # plain descent: a parameter is as far off as its gradients are
    return ng.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), recipe)  # type: ignore[return-value]


def _norms(recipe: str) -> tuple[list[Tensor], list[Tensor], list[Tensor], int]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    one, two = _block(recipe, False), _block(recipe, True)
    mine: list[Tensor] = []
    expected: list[Tensor] = []
    calls = 0
    for step in range(3):
        # what all tokens have in common gives gradients that are sums of like terms, not of noise
        generator = torch.Generator().manual_seed(step)
        common, target = (torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in (10, 11))
        x = 2 * common + torch.randn(2, 32, 64, generator=generator)
        target = target.expand(2, 32, 64)
        ((one[0](x) - target) ** 2).sum().div(64).backward()
        own_x, own_target = (t.chunk(ranks, dim=1)[rank] for t in (x, target))
        loss = ((two[0](own_x) - own_target) ** 2).sum().div(64)
        with wire.counted() as count:
            loss.backward()
        calls = sum(row.calls for row in count.rows if row.role == "grad_comm" and row.collective == "all_to_all")
        for found, model in ((expected, one[0]), (mine, two[0])):
            found += [p.grad.clone() for name, p in model.named_parameters() if name[:5] in ("first", "last.")]  # type: ignore[union-attr]
        for _, optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
    weights = [p.detach().clone() for name, p in two[0].named_parameters() if name[:5] in ("first", "last.")]
    return mine, expected, weights, calls


@pytest.mark.parametrize(("recipe", "bound"), [("bf16", 0.01), ("fp8_current", 0.09), ("narrow8", 0.09)])
def test_gradients_of_norms_are_summed_over_the_ranks(recipe: str, bound: float) -> None:  # case 90
    (mine, expected, weights, calls), (theirs, _, their_weights, _) = run(2, _norms, recipe)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights, their_weights, strict=True))
    for found, wanted in zip(mine, expected, strict=True):
        assert (found - wanted).norm() / wanted.norm() < bound
    assert calls == 1  # of both norms and of the row-parallel bias together


class _One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _far_apart(recipe: str) -> tuple[Tensor, Tensor]:
    """What a layer of the identity gives, from inputs a hundred times larger on rank 1, and these inputs."""
    model: nn.Module = _One()
    _parallel(model, plan={"layer": "column"})
    model, _ = ng.prepare(model, None, recipe)
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1))
    x[:, 16:] *= 100
    rank = dist.get_rank()
    return model(x[:, 16 * rank : 16 * (rank + 1)]).detach(), x[..., 32 * rank : 32 * (rank + 1)]


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise", "mxfp8"])
def test_gathered_codes_are_decoded_by_the_scale_that_they_were_cast_with(recipe: str) -> None:  # case 92
    for found, x in run(2, _far_apart, recipe):
        normal = x.abs() > 0.02 * x.abs().max()  # above that, half a step of E4M3 is 6.25 % of a value at most
        assert ((found - x).abs() <= 0.0625 * x.abs())[normal].all()
        assert ((found - x).abs() <= 0.0625 * 0.02 * x.abs().max())[~normal].all()


def _checkpointed(recipe: str) -> tuple[bool, float]:
    losses, gradients = [], []
    for checkpointing in (False, True):
        model = tiny_gpt(**LLAMA)
        model.activation_checkpointing = checkpointing
        _parallel(model)
        model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
        for step in range(2):
            _, loss = model(*batch(step))
            assert loss is not None
            loss.backward()
            names = [name for name, _ in model.named_parameters()]
            found = [tensor_parallel.whole_gradient(model, name) for name in names]
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        gradients.append(torch.cat([grad.flatten() for grad in found if grad is not None]))
    return torch.equal(*gradients), losses[0] - losses[1]


@pytest.mark.parametrize("recipe", ["fp32", "fp8_current", "fp8_delayed", "narrow8"])
def test_activation_checkpointing_changes_no_bit(recipe: str) -> None:
    assert run(2, _checkpointed, recipe) == [(True, 0.0), (True, 0.0)]


def _evaluated_between() -> bool:
    """Backward recomputes parted sequences, also after a forward of others that are not."""
    model: Any = tiny_gpt(**LLAMA)
    model.activation_checkpointing = True
    _parallel(model)
    found = []
    for between in (False, True):
        loss = model.train()(*batch(1))[1]
        if between:
            with torch.no_grad():
                model.eval()(*batch(2, tokens=15))
            model.train()
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    return all(map(torch.equal, *found))


def test_a_forward_of_other_sequences_before_backward_changes_no_bit() -> None:
    assert run(2, _evaluated_between) == [True, True]


def _sent(recipe: str) -> tuple[set[tuple[str, torch.dtype]], int, list[int]]:
    model: Any = tiny_gpt(width=128, heads=2, ffn_width=256, layers=2, tied_embeddings=False)
    _parallel(model)
    model, _ = ng.prepare(model, None, recipe)
    kept: list[int] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t.numel() if t.dtype is torch.float8_e4m3fn else 0)
        return t

    x = torch.randn(2, 16, 128)
    with wire.counted() as count:
        with saved_tensors_hooks(keep, lambda t: t):
            model.blocks[0].mlp.gate_up(x.requires_grad_()).sum().backward()
            once = count.bytes_of("activation_comm")
        model.zero_grad()
        model(*batch(1))[1].backward()
    dtypes = {(row.collective, row.dtype) for row in count.rows if row.role == "activation_comm"}
    return dtypes, once, [size for size in kept if size]


def test_activations_travel_in_eight_bits_and_wait_as_local_codes() -> None:
    for dtypes, sent, kept in run(2, _sent, "narrow8"):
        assert dtypes == {("all_gather", torch.uint8), ("all_to_all", torch.uint8)}
        values = 2 * 16 * 128  # of this rank's part, which is half of the sequences
        # codes and one scale, forward and for grad_weight; the sum of grad_input in blocks of 128 with a byte each
        assert sent == 2 * (values + 4) + values + values // 128
        assert kept == [values, 256 * 128]  # the input's own part, and this rank's half of 512 x 128 weights


def _overflowing(recipe: str) -> float:
    model: Any = tiny_gpt(**LLAMA)
    _parallel(model)
    model, _ = ng.prepare(model, None, recipe)
    if dist.get_rank() == 1:
        model.embedding.weight.to_local().data[-1] = torch.inf
    ids, targets = batch(1)
    ids[:, 12] = 63  # on the second half of the sequence, which rank 1 has
    return float(model(ids, targets)[1].detach())


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "narrow8"])
def test_an_overflow_on_one_rank_is_seen_by_all(recipe: str) -> None:
    for loss in run(2, _overflowing, recipe):
        assert loss != loss


def _asked() -> bool:
    """Gradients that are asked for are those that backward leaves."""
    model: Any = tiny_gpt(**GPT3)
    _parallel(model)
    ids, targets = (t.clamp(max=62) for t in batch(1))
    wanted = [
        p for name, p in model.named_parameters() if "norm" in name or name.endswith(("down.bias", "positions.weight"))
    ]
    found = torch.autograd.grad(model(ids, targets)[1], wanted)
    model(ids, targets)[1].backward()
    return all(torch.equal(a, p.grad) for a, p in zip(found, wanted, strict=True))


def test_asking_for_gradients_gives_sums() -> None:
    assert run(2, _asked) == [True, True]


def _evaluated() -> tuple[bool, bool, bool]:
    one, two = tiny_gpt(**LLAMA), tiny_gpt(**LLAMA)
    _parallel(two)
    same = []
    for tokens in (16, 15):  # 15 cannot be parted: each rank has whole sequences
        ids, targets = batch(1, tokens=tokens)
        losses = [model.eval()(ids, targets)[1] for model in (one, two)]
        same.append(torch.allclose(*losses, rtol=1e-5))  # type: ignore[arg-type]
    prompt = torch.tensor([[1, 2, 3]])
    return *same, torch.equal(one.generate(prompt, 6, temperature=0), two.generate(prompt, 6, temperature=0))  # type: ignore[return-value]


def test_evaluation_takes_any_length() -> None:
    assert run(2, _evaluated) == [(True, True, True)] * 2


def _frozen_mode() -> float:
    """Gradients in evaluation mode with sequences that do not divide: nothing is parted, so nothing is summed."""
    one, two = tiny_gpt(**LLAMA), tiny_gpt(**LLAMA)
    _parallel(two)
    ids, targets = batch(1, tokens=15)
    for model in (one, two):
        model.eval()(ids, targets)[1].backward()  # type: ignore[union-attr]
    return _worst(one, two)


def test_gradients_of_whole_sequences_are_not_summed() -> None:
    for error in run(2, _frozen_mode):
        assert error < 1e-5


def _refused() -> list[str]:
    found = []
    model: GPT = tiny_gpt(**LLAMA)
    _parallel(model)
    with pytest.raises(DataError) as tokens:
        model(*batch(1, tokens=15))
    found.append(str(tokens.value))
    block: nn.Module = _Block()
    _parallel(block, plan={"up": "column", "down": "row"})
    block, _ = ng.prepare(block, None, "mxfp8")
    with pytest.raises(ConversionError) as tiles:
        block(torch.randn(1, 24, 64, requires_grad=True)).sum().backward()
    return [*found, str(tiles.value)]


def test_sequences_that_do_not_divide_are_refused() -> None:
    tokens, tiles = run(2, _refused)[0]
    assert "multiple of 2 tokens in training, found 15" in tokens
    assert "expected a multiple of 32 tokens on each of 2 processes, found 24" in tiles

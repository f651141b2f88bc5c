"""Tensor parallelism against one process: values, gradients, training, generation, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from models import batch, tiny_config, tiny_gpt
from ranks import run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import narrowgauge as ng
from narrowgauge.distributed import tensor_parallel, wire
from narrowgauge.errors import ConversionError
from narrowgauge.models.gpt import GPT

pytestmark = pytest.mark.multiproc

LLAMA = {"heads": 4, "kv_heads": 2, "tied_embeddings": False}
GPT3 = {
    "positions": "learned", "norm": "layernorm", "norm_bias": True, "attention_bias": True, "mlp_bias": True,
    "activation": "gelu", "tied_embeddings": True, "vocab_size": 63,
}  # fmt: skip


def _parallel(model: nn.Module, **options: object) -> nn.Module:
    found = ng.distributed.layout(tensor=dist.get_world_size())
    return ng.distributed.parallelize_tensor(model, found, **options)  # type: ignore[arg-type]


def _pair(changes: dict[str, object]) -> tuple[GPT, GPT]:
    one, two = tiny_gpt(**changes), tiny_gpt(**changes)
    _parallel(two)
    return one, two


def _errors(one: nn.Module, two: nn.Module) -> dict[str, float]:
    """The relative error of each gradient."""
    found = {}
    for name, p in one.named_parameters():
        gradient = tensor_parallel.whole_gradient(two, name)
        assert gradient is not None and p.grad is not None and gradient.shape == p.shape, name
        found[name] = ((gradient - p.grad).norm() / p.grad.norm()).item()
    return found


def _parity(changes: dict[str, object]) -> tuple[float, float, float]:
    one, two = _pair(changes)
    for name, p in one.named_parameters():
        assert torch.equal(tensor_parallel.whole_parameter(two, name), p), name
    assert list(one.state_dict()) == list(two.state_dict())
    assert one.parameter_count() == two.parameter_count()
    ids, targets = (t.clamp(max=62) for t in batch(1))
    targets[0, :3] = -100
    losses = []
    for model in (one, two):
        for _ in range(2):  # gradients add up
            _, loss = model(ids, targets)
            assert loss is not None
            loss.backward()
        losses.append(loss.item())
    return losses[0], losses[1], max(_errors(one, two).values())


@pytest.mark.parametrize(("ranks", "changes"), [(2, LLAMA), (2, GPT3), (4, {**LLAMA, "kv_heads": 4})])
def test_loss_and_gradients_in_float32_are_those_of_one_process(ranks: int, changes: dict[str, object]) -> None:
    for one, two, error in run(ranks, _parity, changes):
        assert two == pytest.approx(one, rel=1e-5) and error < 1e-5


def _parts() -> list[str]:
    _, two = _pair(GPT3)
    for name in ("blocks.0.attention.qkv.weight", "blocks.0.mlp.up.bias", "embedding.weight"):
        p = two.get_parameter(name)
        assert isinstance(p, DTensor) and p.placements[0].is_shard(0), name
        assert p.device_mesh.mesh_dim_names == ("tensor",)
    assert two.get_parameter("blocks.0.mlp.down.weight").placements[0].is_shard(1)  # type: ignore[attr-defined]
    assert not isinstance(two.get_parameter("blocks.0.mlp.down.bias"), DTensor)
    assert two.lm_head.weight is two.embedding.weight
    assert two.blocks[0].attention.heads == 1
    sizes = [str(tuple(p.to_local().shape)) for p in two.parameters() if isinstance(p, DTensor)]
    return sizes[:3]


def test_parameters_are_dtensors_and_tied_ones_stay_one() -> None:
    assert run(2, _parts) == [["(32, 64)", "(96, 64)", "(96,)"], ["(31, 64)", "(96, 64)", "(96,)"]]


def _trained(recipe: str, changes: dict[str, object]) -> tuple[list[float], list[float], float, bytes]:
    models = [tiny_gpt(**changes) for _ in range(2)]
    _parallel(models[1])
    losses: list[list[float]] = [[], []]
    worst = 0.0
    for at in range(2):
        optimizer = torch.optim.AdamW(models[at].parameters(), lr=1e-3)
        models[at], optimizer = ng.prepare(models[at], optimizer, recipe)
        for step in range(3):
            ids, targets = batch(step)
            _, loss = models[at](ids, targets)
            assert loss is not None
            loss.backward()
            losses[at].append(loss.item())
            if at and not step:
                worst = max(_first_errors(models[0], models[1], batch(0)))
            optimizer.step()
            optimizer.zero_grad()
    whole = [p.detach().float() for p in models[1].parameters() if not isinstance(p, DTensor)]
    return *losses, worst, torch.cat([p.flatten() for p in whole]).numpy().tobytes()  # type: ignore[return-value]


def _first_errors(one: nn.Module, two: nn.Module, data: tuple[Tensor, Tensor]) -> list[float]:
    """Relative errors of the first step's gradients, with those of one process made anew from the same weights."""
    fresh = tiny_gpt()
    recipe = one.forward.recipe  # type: ignore[attr-defined,union-attr]
    fresh, _ = ng.prepare(fresh, torch.optim.AdamW(fresh.parameters()), recipe)
    _, loss = fresh(*data)
    loss.backward()
    found = []
    for name, p in fresh.named_parameters():
        gradient = tensor_parallel.whole_gradient(two, name)
        assert gradient is not None and p.grad is not None
        expected = p.grad.dequantize() if hasattr(p.grad, "codes") else p.grad
        found.append(((gradient - expected).norm() / expected.norm()).item())
    return found


@pytest.mark.parametrize(
    ("recipe", "bound"), [("fp32", 1e-5), ("bf16", 0.03), ("fp8_current", 0.2), ("narrow8", 0.3), ("fp8_lm_o2", 0.3)]
)
def test_training_follows_one_process(recipe: str, bound: float) -> None:
    found = run(2, _trained, recipe, {}, timeout_s=300)
    assert found[0][1] == found[1][1] and found[0][3] == found[1][3]  # losses and whole parameters: the same bits
    one, two, error, _ = found[0]
    assert error < bound
    assert two == pytest.approx(one, abs=1e-5 if recipe == "fp32" else 0.01)


def _generated(recipe: str | None) -> tuple[Tensor, Tensor]:
    one, two = _pair(LLAMA)
    if recipe is not None:
        ng.convert(two, recipe)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected = one.generate(prompt, 8, temperature=0)
    return two.generate(prompt, 8, temperature=0), expected


def test_generation_is_that_of_one_process() -> None:
    for found, expected in run(2, _generated, None):
        assert torch.equal(found, expected)
    first, second = run(2, _generated, "fp8_current")
    assert torch.equal(first[0], second[0]) and first[0].shape == (2, 11)


def _from_meta() -> list[str]:
    one = tiny_gpt(seed=7, **GPT3)
    with torch.device("meta"):
        two = GPT(tiny_config(**GPT3))
    _parallel(two)
    two.to_empty(device="cpu")
    two.reset_parameters(torch.Generator().manual_seed(7))
    assert two.lm_head.weight is two.embedding.weight
    ids, targets = (t.clamp(max=62) for t in batch(1))
    assert torch.allclose(two(ids, targets)[1], one(ids, targets)[1])  # type: ignore[arg-type]
    return [n for n, p in one.named_parameters() if not torch.equal(tensor_parallel.whole_parameter(two, n), p)]


def test_a_model_from_the_meta_device_is_drawn_as_on_one_process() -> None:
    assert run(2, _from_meta) == [[], []]


def _copied() -> list[bool]:
    _, two = _pair(LLAMA)
    ids, targets = batch(1)
    twin = copy.deepcopy(two)
    with torch.no_grad():
        for p in two.parameters():
            p.zero_()
    expected = torch.tensor(64.0).log()  # of logits that are all alike
    losses = twin(ids, targets)[1], two(ids, targets)[1]
    return [bool(torch.isclose(loss, expected)) for loss in losses]  # type: ignore[arg-type]


def test_a_copy_is_independent() -> None:
    assert run(2, _copied) == [[False, True], [False, True]]


class _Plain(nn.Module):
    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.up = nn.Linear(8, hidden)
        self.down = nn.Linear(hidden, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


PLAN = {"up": "column", "down": "row"}


def _plain() -> tuple[bool, float, list[tuple[str, str, int]]]:
    torch.manual_seed(0)
    one = _Plain()
    two = copy.deepcopy(one)
    _parallel(two, plan=PLAN)
    x = torch.randn(5, 8)
    y = one(x)
    y.square().sum().backward()
    x = x.requires_grad_()
    with wire.counted() as count:
        found = two(x)
        found.square().sum().backward()
    sent = [(row.role, row.collective, row.bytes) for row in count.rows]
    return torch.allclose(found, y, atol=1e-6), max(_errors(one, two).values()), sent


def test_a_plan_parts_a_model_of_plain_layers() -> None:
    for same, error, sent in run(2, _plain):
        assert same and error < 1e-5
        # one sum of 5 x 6 outputs and one of 5 x 8 gradients of the input, each in two phases
        assert sent == [
            ("activation_comm", "all_to_all", 4 * (15 + 20)), ("activation_comm", "all_gather", 4 * (15 + 20))
        ]  # fmt: skip


def _refusals() -> list[str]:
    class Tied(_Plain):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Bilinear(8, 8, 24)  # type: ignore[assignment]

    cases = [
        (tiny_gpt(heads=1, kv_heads=1), {}),
        (tiny_gpt(heads=4, kv_heads=1), {}),
        (tiny_gpt(experts=4), {}),
        (_Plain(25), {"plan": PLAN}),
        (_Plain(), {"plan": {"upp": "column"}}),
        (_Plain(), {"plan": {"up": "columns"}}),
        (Tied(), {"plan": PLAN}),
        (_Plain(), {}),
    ]
    found = []
    for model, options in cases:
        before = {name: id(p) for name, p in model.named_parameters()}
        with pytest.raises(ConversionError) as error:
            _parallel(model, **options)  # type: ignore[arg-type]
        assert before == {name: id(p) for name, p in model.named_parameters()}  # nothing has changed
        found.append(str(error.value))
    twice = tiny_gpt()
    _parallel(twice)
    with pytest.raises(ConversionError) as error:
        _parallel(twice)
    return [*found, str(error.value)]


def test_what_cannot_be_parted_is_named_with_a_remedy() -> None:
    heads, kv_heads, experts, features, glob, kind, layer, no_plan, twice = run(2, _refusals)[0]
    assert "'blocks.0.attention': heads: 1 does not divide into 2" in heads and "choose" in heads
    assert "'blocks.0.attention': kv_heads: 1 does not divide into 2" in kv_heads
    assert "'blocks.0.mlp'" in experts and "expert parallelism" in experts
    assert "'up': out_features: 25 does not divide into 2" in features
    assert "'upp'" in glob and "no module" in glob
    assert "expected one of 'column', 'row', 'embedding', 'head', 'partial'" in kind
    assert "'up': expected a torch.nn.Linear, found Bilinear" in layer
    assert "give a plan" in no_plan
    assert "parted already" in twice


def _alone() -> bool:
    model = tiny_gpt()
    ng.distributed.parallelize_tensor(model, ng.distributed.layout(data=2))
    return not any(isinstance(p, DTensor) for p in model.parameters())


def test_one_tensor_parallel_rank_has_all() -> None:
    assert run(2, _alone) == [True, True]

"""A QuantizedTensor as a parameter: modules, `.data`, initialization, copies, checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_tensors import FP8, PARAMETER_SPECS, SCALED_FP16, bits, layer, values, weight_of
from torch import nn

from narrowgauge import CastSpec, NarrowgaugeError
from narrowgauge.numerics.formats import E5M2
from narrowgauge.tensors.quantized import QuantizedTensor, quantize


def test_a_module_takes_it_as_a_parameter() -> None:
    module = layer(FP8)
    assert weight_of(module).requires_grad
    assert dict(module.named_parameters())["weight"] is module.weight
    x = torch.randn(3, 8)
    assert torch.equal(module(x), nn.functional.linear(x, values(module.weight), module.bias))
    module(x).square().sum().backward()
    assert type(module.weight.grad) is torch.Tensor and module.weight.grad.shape == (6, 8)
    module.weight.requires_grad_(False)
    assert not module.weight.requires_grad


# .data


@pytest.mark.parametrize("spec", PARAMETER_SPECS)
def test_writes_through_data_are_kept(spec: CastSpec) -> None:
    p = weight_of(layer(spec))
    new = torch.randn(6, 8)
    p.data.copy_(new)
    assert bits(p) == bits(quantize(new, spec))
    p.data.mul_(0.5)
    assert torch.equal(values(p), values(quantize(new, spec)) * 0.5)
    p.data[2] = 0.0
    p.data[:, 1].fill_(2.0)
    assert not p.data[2, 2:].any() and torch.allclose(values(p)[:, 1], torch.tensor(2.0))
    p.data.zero_()
    assert not values(p).any()
    p.data += 1
    assert torch.allclose(values(p), torch.tensor(1.0))
    assert p.requires_grad and p.is_leaf and isinstance(p, nn.Parameter)


@pytest.mark.parametrize("spec", PARAMETER_SPECS)
def test_assigning_a_plain_tensor_to_data_casts_it(spec: CastSpec) -> None:
    p = weight_of(layer(spec))
    new = torch.randn(6, 8) * 100
    p.data = new
    assert bits(p) == bits(quantize(new, spec))
    p.data = new.bfloat16()
    assert p.dtype is torch.bfloat16 and bits(p) == bits(quantize(new.bfloat16(), spec))


def test_assigning_a_quantized_tensor_to_data_takes_its_codes_or_recasts_it() -> None:
    p = weight_of(layer(FP8))
    same = quantize(torch.randn(6, 8), FP8)
    p.data = same
    assert bits(p) == bits(same) and p.codes.data_ptr() == same.codes.data_ptr()
    same.fill_(1.0)
    assert torch.equal(values(p), values(same))  # aliases, as with plain tensors
    other = quantize(torch.randn(6, 8), CastSpec(E5M2))
    p.data = other
    assert p.spec == FP8 and bits(p) == bits(quantize(other.dequantize(), FP8))


@pytest.mark.parametrize("spec", PARAMETER_SPECS)
def test_an_emptied_parameter_is_restored(spec: CastSpec) -> None:
    p = weight_of(layer(spec))  # case 114
    before, saved = bits(p), p.data
    p.data = torch.empty(0)
    assert p.shape == (0,) and p.numel() == 0 and values(p).shape == (0,)
    p.data = saved
    assert p.shape == (6, 8) and bits(p) == before
    copied = values(p)
    p.data = torch.empty(0)
    p.data = copied
    assert torch.allclose(values(p), copied, rtol=1e-6)
    if spec.has_pow2_scale:
        assert bits(p)[:2] == before[:2]  # powers of two come back bit by bit


def test_storage_tricks_are_refused() -> None:
    p = weight_of(layer(FP8))  # case 114
    before = bits(p)
    with pytest.raises(RuntimeError, match="invalid python storage"):
        p.untyped_storage().resize_(0)
    with pytest.raises(NarrowgaugeError, match="expected a tensor of float16"):
        p.data = torch.zeros(6, 8, dtype=torch.int64)
    with pytest.raises(NarrowgaugeError, match="to_empty"):
        p.data = torch.zeros(6, 8, device="meta")
    assert bits(p) == before


def test_vectors_of_parameters() -> None:
    module = layer(SCALED_FP16)
    vector = nn.utils.parameters_to_vector(module.parameters())
    assert type(vector) is torch.Tensor and torch.equal(vector[:48], values(module.weight).flatten())
    weight = module.weight
    nn.utils.vector_to_parameters(vector.detach() * 2, module.parameters())
    assert module.weight is weight and torch.equal(values(weight).flatten(), vector[:48] * 2)


# initialization


@pytest.mark.parametrize("spec", PARAMETER_SPECS)
@pytest.mark.parametrize(
    "initialize",
    [
        lambda w: nn.init.normal_(w, std=0.02),
        lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
        lambda w: nn.init.xavier_normal_(w),
        lambda w: nn.init.trunc_normal_(w, std=0.02),
        lambda w: nn.init.zeros_(w),
        lambda w: nn.init.orthogonal_(w),
        lambda w: w.data.normal_(mean=0.0, std=0.02),
    ],
)
def test_initialization_reaches_the_codes(spec: CastSpec, initialize: Callable[[torch.Tensor], object]) -> None:
    p, plain = weight_of(layer(spec)), torch.empty(6, 8)  # case 102
    torch.manual_seed(7)
    initialize(p)
    torch.manual_seed(7)
    initialize(plain)
    assert torch.equal(values(p), values(quantize(plain, spec)))


@pytest.mark.parametrize("spec", PARAMETER_SPECS)
def test_reset_parameters_gives_the_asked_for_spread(spec: CastSpec) -> None:
    module = nn.Embedding(512, 64, padding_idx=3)  # case 102
    module.weight = nn.Parameter(quantize(module.weight, spec))
    for seed in (0, 1):
        torch.manual_seed(seed)
        module.reset_parameters()
        assert not module.weight[3].any()
        nn.init.normal_(module.weight, std=0.02)
        assert 0.019 < module.weight.std() < 0.021 and module.weight.mean().abs() < 1e-3
    assert isinstance(module.weight, QuantizedTensor)


@pytest.mark.parametrize("spec", PARAMETER_SPECS)
def test_built_on_meta_it_initializes_as_on_the_cpu(spec: CastSpec) -> None:
    with torch.device("meta"):  # case 113
        module = layer(spec)
    weight = weight_of(module)
    assert weight.is_meta and weight.codes.is_meta
    module.requires_grad_(False)
    module.to_empty(device="cpu")
    assert module.weight is weight and weight.device.type == "cpu" and not weight.requires_grad
    assert weight.dequant_scale == 1
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(float("nan"))
    assert weight.isnan().all()
    torch.manual_seed(3)
    module.reset_parameters()
    expected = nn.Linear(8, 6)
    torch.manual_seed(3)
    expected.reset_parameters()
    assert torch.equal(values(weight), values(quantize(expected.weight, spec)))
    assert weight.isfinite().all()


# moving, copying, checkpoints


def test_moving_a_module_keeps_the_parameter() -> None:
    module = layer(FP8)
    weight, before = module.weight, bits(module.weight)
    module(torch.randn(2, 8)).sum().backward()
    for dtype in (torch.bfloat16, torch.float32):
        module.to(dtype)
        assert module.weight is weight and weight.dtype is dtype and bits(weight) == before
        assert weight.grad is not None and weight.grad.dtype is dtype
    module.share_memory()
    assert module.weight is weight and weight.is_shared() and bits(weight) == before


@pytest.mark.parametrize("spec", PARAMETER_SPECS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_equal_and_independent(spec: CastSpec, duplicate: Callable[[nn.Module], nn.Linear]) -> None:
    module, x = layer(spec), torch.randn(3, 8)  # case 72
    module.weight.tag = "kept"  # type: ignore[attr-defined]
    module(x).sum().backward()
    before = bits(module.weight)
    other = duplicate(module)
    assert torch.equal(other(x), module(x))
    assert weight_of(other).requires_grad and other.weight.tag == "kept"  # type: ignore[attr-defined]
    for part in ("codes", "dequant_scale", "amax"):
        assert getattr(other.weight, part).data_ptr() != getattr(module.weight, part).data_ptr()
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    for _ in range(2):
        other(x).square().sum().backward()
        optimizer.step()
    assert bits(other.weight) != before and bits(module.weight) == before


def test_a_deep_copied_parameter_takes_its_gradient_along() -> None:
    p = weight_of(layer(FP8))
    (p * 2).sum().backward()
    other = copy.deepcopy(p)
    assert other.grad is not None and other.grad is not p.grad and (other.grad == 2).all()
    with pytest.raises(RuntimeError, match="only leaf tensors"):
        copy.deepcopy(p.view(-1))


@pytest.mark.parametrize("spec", PARAMETER_SPECS)
def test_state_dicts_load_both_ways(spec: CastSpec) -> None:
    module, plain = layer(spec, seed=0), nn.Linear(8, 6)
    weight = module.weight
    module.load_state_dict(plain.state_dict())
    assert module.weight is weight and bits(weight) == bits(quantize(plain.weight, spec))
    source = layer(spec, seed=1)
    plain.load_state_dict(source.state_dict())
    assert type(plain.weight) is nn.Parameter and torch.equal(plain.weight, values(source.weight))
    module.load_state_dict(source.state_dict())
    assert module.weight is weight and bits(weight) == bits(source.weight)
    with torch.device("meta"):
        empty = layer(spec)
    empty.load_state_dict(source.state_dict(), assign=True)
    assert bits(weight_of(empty)) == bits(source.weight)


def test_a_saved_module_loads_with_weights_only() -> None:
    module, file = layer(SCALED_FP16), io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = layer(SCALED_FP16, seed=1)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert bits(other.weight) == bits(module.weight)


def test_a_saved_module_loads_where_only_the_package_was_imported(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"  # case 71
    torch.save(layer(FP8).state_dict(), path)
    code = f"import narrowgauge, torch; print(type(torch.load({str(path)!r}, weights_only=True)['weight']).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "QuantizedTensor", done.stderr


def _double(weight: torch.Tensor, answers: torch.multiprocessing.SimpleQueue) -> None:
    """What the other process does: write to the parameter that it was handed."""
    with torch.no_grad():
        weight.mul_(2)
    answers.put((type(weight).__name__, weight.requires_grad))


@pytest.mark.multiproc
def test_another_process_shares_it() -> None:
    weight = weight_of(layer(SCALED_FP16))  # case 72
    before = values(weight)
    context = torch.multiprocessing.get_context("spawn")
    weight.share_memory_()
    answers = context.SimpleQueue()
    process = context.Process(target=_double, args=(weight, answers))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert answers.get() == ("QuantizedTensor", True)
    assert torch.equal(values(weight), before * 2)

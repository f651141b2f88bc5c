"""Weights in FP8 from other programs become values, whatever the layout of their scales, and never raw codes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import CheckpointError
from narrowgauge.train.weights import load_weights

ROWS, COLUMNS = 200, 130  # partial blocks of 128


def a_weight(std: float = 0.02) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * std


def in_fp8(weight: Tensor, granularity=ng.PER_TENSOR, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(codes, what to multiply them by), the scale in `dtype`."""
    q = ng.quantize(weight, ng.CastSpec(ng.formats.E4M3FN, granularity))
    return q.codes, q.dequant_scale.to(dtype)


def plain_linear(dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(COLUMNS, ROWS, bias=False, dtype=dtype)


LAYOUTS = {
    "0-d": (ng.PER_TENSOR, lambda s: s),
    "(1,)": (ng.PER_TENSOR, lambda s: s.reshape(1)),
    "(1, 1)": (ng.PER_TENSOR, lambda s: s.reshape(1, 1)),
    "(N, 1)": (ng.PER_ROW, lambda s: s),
    "(N,)": (ng.PER_ROW, lambda s: s.reshape(-1)),
    "blocks": (ng.Block(128, 128), lambda s: s),
}
NAMES = ["weight_scale_inv", "weight_scale", "scale_inv", "scale", "qscale_weight"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_layout_and_name_gives_the_weight(layout: str, name: str) -> None:  # case 73, case 74
    granularity, shaped = LAYOUTS[layout]
    weight = a_weight()
    codes, scale = in_fp8(weight, granularity)
    expected = ng.QuantizedTensor(codes, scale, ng.CastSpec(ng.formats.E4M3FN, granularity)).dequantize()
    layer = plain_linear(torch.float32)
    load_weights({"weight": codes, name: shaped(scale)}, layer)
    assert torch.equal(layer.weight, expected)
    # half a unit in the last of 3 mantissa bits, or half the smallest subnormal times the largest scale
    assert ((layer.weight - weight).abs() <= torch.maximum(weight.abs() * 2**-4, scale.max() * 2**-10)).all()


def test_a_block_is_multiplied_by_its_own_scale_at_the_edges_too() -> None:  # case 74
    codes = torch.ones(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    layer = plain_linear(torch.float32)
    load_weights({"weight": codes, "weight_scale_inv": scale}, layer)
    for rows, columns, value in (
        (slice(0, 128), slice(0, 128), 1.0),
        (slice(0, 128), slice(128, None), 2.0),
        (slice(128, None), slice(0, 128), 3.0),
        (slice(128, None), slice(128, None), 4.0),
    ):
        assert (layer.weight[rows, columns] == value).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_in_sixteen_bits_are_taken_as_they_are(dtype: torch.dtype) -> None:
    codes, scale = in_fp8(a_weight(1.0), ng.PER_ROW, dtype)
    layer = plain_linear(torch.float32)
    load_weights({"weight": codes, "weight_scale": scale}, layer)
    assert torch.equal(layer.weight, codes.float() * scale.float())


@pytest.mark.parametrize("as_bytes", [False, True])
def test_mx_scales_are_powers_of_two_in_a_byte(as_bytes: bool) -> None:
    q = ng.quantize(a_weight(), ng.CastSpec(ng.formats.E4M3FN, ng.Block(1, 32), ng.E8M0_UP))
    scale = q.dequant_scale.view(torch.uint8) if as_bytes else q.dequant_scale
    layer = plain_linear(torch.float32)
    load_weights({"weight": q.codes, "weight_scale": scale}, layer)
    assert torch.equal(layer.weight, q.dequantize())


def test_stacked_experts_have_their_dimension_before_the_others() -> None:
    codes = torch.ones(3, 4, 5).to(torch.float8_e5m2)
    for scale in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)):
        module = nn.Module()
        module.stacked = nn.Parameter(torch.zeros(3, 4, 5))
        load_weights({"stacked": codes, "stacked_scale": scale}, module)
        assert module.stacked[:, 0, 0].tolist() == [1.0, 2.0, 3.0] and bool((module.stacked[2] == 3).all())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_missing_scale_names_its_tensor_strict_or_not(strict: bool, dtype: torch.dtype) -> None:  # case 73
    model = nn.Sequential(plain_linear(dtype), nn.Linear(ROWS, 3, bias=False, dtype=dtype))
    before = [p.detach().clone() for p in model.parameters()]
    first, scale = in_fp8(a_weight())
    second, _ = in_fp8(torch.randn(3, ROWS))
    state = {"0.weight": first, "0.weight_scale_inv": scale, "1.weight": second}
    with pytest.raises(CheckpointError, match=r"'1\.weight' is in FP8 and its scale is missing.*1\.weight_scale_inv"):
        load_weights(state, model, strict=strict)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_inverse_of_a_scale_is_noticed(layout: str) -> None:  # case 74
    granularity, shaped = LAYOUTS[layout]
    for std in (1e-3, 0.02, 1.0):
        codes, scale = in_fp8(a_weight(std), granularity)
        with pytest.raises(CheckpointError, match=r"'weight' times 'weight_scale' reaches.*store 1 / scale"):
            load_weights({"weight": codes, "weight_scale": shaped(1 / scale)}, plain_linear())


@pytest.mark.parametrize(
    "scale",
    [torch.ones(1, COLUMNS), torch.ones(ROWS, 2), torch.ones(3, 2), torch.ones(2), torch.ones(2, 1), torch.ones(0)],
    ids=lambda s: str(tuple(s.shape)),
)
def test_a_scale_of_another_shape_is_refused(scale: Tensor) -> None:  # case 74
    codes, _ = in_fp8(a_weight())
    with pytest.raises(CheckpointError, match=r"'weight_scale'.*\(200, 1\), \(2, 2\).*found shape"):
        load_weights({"weight": codes, "weight_scale": scale}, plain_linear())


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_is_none_is_refused(value: float) -> None:
    codes, _ = in_fp8(a_weight())
    with pytest.raises(CheckpointError, match=r"'weight_scale': expected finite scales above 0"):
        load_weights({"weight": codes, "weight_scale": torch.tensor(value)}, plain_linear())


def test_two_scales_are_one_too_many() -> None:
    codes, scale = in_fp8(a_weight())
    with pytest.raises(CheckpointError, match="more than one scale: weight_scale_inv, weight_scale"):
        load_weights({"weight": codes, "weight_scale": scale, "weight_scale_inv": scale}, plain_linear())


def test_nan_codes_stay_nan_and_do_not_hide_a_wrong_scale() -> None:
    weight = a_weight()
    weight[3, 4] = math.nan
    codes, scale = in_fp8(weight, ng.PER_ROW)
    layer = plain_linear(torch.float32)
    load_weights({"weight": codes, "weight_scale": scale}, layer)
    assert layer.weight.isnan().nonzero().tolist() == [[3, 4]]
    with pytest.raises(CheckpointError, match="1 / scale"):
        load_weights({"weight": codes, "weight_scale": 1 / in_fp8(a_weight())[1]}, layer)


def test_scales_of_activations_are_left_out_with_a_reason_unless_the_model_has_them() -> None:
    codes, scale = in_fp8(a_weight())
    state = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(2.0)}
    found = load_weights(state, plain_linear())
    assert list(found.ignored) == ["input_scale"] and "activations" in found.ignored["input_scale"]
    layer = plain_linear()
    layer.register_buffer("input_scale", torch.tensor(0.0))
    assert load_weights(state, layer).ignored == {} and layer.input_scale == 2.0
    with pytest.raises(CheckpointError, match="input_scale"):  # without FP8 it is just an unknown name
        load_weights({"weight": a_weight(), "input_scale": torch.tensor(2.0)}, plain_linear())


def test_strict_and_not() -> None:
    codes, scale = in_fp8(a_weight())
    state = {"weight": codes, "weight_scale": scale, "other": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"other.*strict=False"):
        load_weights(state, plain_linear())
    layer = nn.Linear(COLUMNS, ROWS)
    found = load_weights(state, layer, strict=False)
    assert found.missing == ["bias"] and found.unexpected == ["other"]
    assert torch.equal(layer.weight, codes.float() * scale)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_codes_of_other_formats_are_no_values(dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=f"'weight': expected floating values.*{dtype}"):
        load_weights({"weight": torch.ones(ROWS, COLUMNS, dtype=dtype)}, plain_linear(), strict=False)


@pytest.mark.filterwarnings("ignore:.*none of this model's is quantized:UserWarning")
@pytest.mark.parametrize("recipe", ["fp32", "bf16_pure", "fp16_pure", "fp8_block"])
def test_a_prepared_model_takes_the_values_into_its_own_format(recipe: str) -> None:  # case 77
    codes, scale = in_fp8(a_weight())
    layer, _ = ng.prepare(plain_linear(torch.float32), None, recipe)
    load_weights({"weight": codes, "weight_scale": scale}, layer)
    values = codes.float() * scale
    found = layer.weight.detach().float()
    # half a unit in the last of 8 bits, of 11 bits, or nothing
    bound = {"bf16_pure": 2**-8, "fp16_pure": 2**-11}.get(recipe, 0.0)
    assert ((found - values).abs() <= values.abs() * bound).all()


class TestFiles:
    def test_a_file_and_a_folder_with_its_own_block_size(self, tmp_path: Path) -> None:
        codes, scale = in_fp8(a_weight(), ng.Block(64, 32))
        layer = plain_linear(torch.float32)
        save_file({"weight": codes, "weight_scale_inv": scale}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="block size"):
            load_weights(tmp_path / "model.safetensors", layer)
        load_weights(tmp_path / "model.safetensors", layer, block=(64, 32))
        expected = layer.weight.detach().clone()
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 32]}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        layer = plain_linear(torch.float32)
        assert ng.load(tmp_path, layer) == {}
        assert torch.equal(layer.weight, expected)
        assert torch.equal(expected, ng.quantize(a_weight(), ng.CastSpec(ng.formats.E4M3FN, ng.Block(64, 32))))

    def test_an_index_names_the_files(self, tmp_path: Path) -> None:
        codes, scale = in_fp8(a_weight())
        save_file({"weight": codes}, tmp_path / "a.safetensors")
        save_file({"weight_scale": scale}, tmp_path / "b.safetensors")
        index = {"weight_map": {"weight": "a.safetensors", "weight_scale": "b.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        layer = plain_linear(torch.float32)
        load_weights(tmp_path, layer)
        assert torch.equal(layer.weight, codes.float() * scale)
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "../a.safetensors"}}')
        with pytest.raises(CheckpointError, match="of its own folder"):
            load_weights(tmp_path, layer)
        (tmp_path / "model.safetensors.index.json").write_text('{"weights": {}}')
        with pytest.raises(CheckpointError, match="weight_map"):
            load_weights(tmp_path, layer)

    @pytest.mark.parametrize("new_format", [True, False])
    def test_pickled_code_is_refused_unread(self, tmp_path: Path, new_format: bool) -> None:
        layer = plain_linear()
        torch.save(layer, tmp_path / "model.pt", _use_new_zipfile_serialization=new_format)
        for name in ("model.pt", "model.safetensors"):
            if name != "model.pt":
                (tmp_path / "model.pt").rename(tmp_path / name)
            with pytest.raises(CheckpointError, match=r"found pickled data.*weights_only=True"):
                ng.load(tmp_path / name, layer)
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, which may hold pickled code"):
            load_weights(folder, layer)

    def test_what_is_no_safetensors_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
        for path in (tmp_path / "a", tmp_path / "none"):
            with pytest.raises(CheckpointError, match="expected a safetensors file"):
                load_weights(path, plain_linear())

    @pytest.mark.parametrize("size", ["[0, 128]", "[128]", '"x"', "7"])
    def test_a_block_size_that_is_none_is_refused(self, tmp_path: Path, size: str) -> None:
        save_file({"weight": a_weight()}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(f'{{"quantization_config": {{"weight_block_size": {size}}}}}')
        with pytest.raises(CheckpointError, match="weight_block_size"):
            load_weights(tmp_path, plain_linear())

    def test_an_optimizer_needs_a_checkpoint_of_ours(self, tmp_path: Path) -> None:
        save_file({"weight": a_weight()}, tmp_path / "model.safetensors")
        layer = plain_linear()
        with pytest.raises(CheckpointError, match="holds no optimizer state"):
            ng.load(tmp_path / "model.safetensors", layer, torch.optim.AdamW(layer.parameters()))


def test_a_tied_parameter_needs_one_of_its_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    load_weights({"1.weight": torch.ones(4, 4)}, model)
    assert model[0].weight is model[1].weight and bool((model[0].weight == 1).all())

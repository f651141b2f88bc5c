from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.numerics import formats, reference, scaling
from narrowgauge.numerics.formats import E4M3FN, E5M2, FP16, Format
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_UP, NONE, TENSOR_POW2, ScaleRule

RULES = (NONE, CURRENT, CURRENT_POW2, TENSOR_POW2, E8M0_UP)


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, np.uint32).view(np.float32))


def to_bits(x: torch.Tensor) -> list[int]:
    return [b & 0xFFFFFFFF for b in x.reshape(-1).view(torch.int32).tolist()]


def hexes(values: list[str]) -> list[int]:
    return [int(v, 16) for v in values]


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=repr)
@pytest.mark.parametrize(("rule", "suffix"), [(CURRENT, "f32"), (CURRENT_POW2, "pow2")], ids=["float32", "pow2"])
def test_current_scales_and_their_inverses_equal_the_golden_bits(
    fmt: Format, rule: ScaleRule, suffix: str, golden
) -> None:
    file = golden("scales")
    amax = hexes(file["amax_f32_hex"])
    table = file["tables"][f"{fmt.name.lower()}_{suffix}"]
    scale = scaling.quant_scale_of(from_bits(amax), fmt, rule)
    assert to_bits(scale) == hexes(table["scale_f32_hex"])
    assert to_bits(scaling.dequant_scale_of(scale)) == hexes(table["inverse_f32_hex"])


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, FP16], ids=repr)
def test_tensor_power_of_two_scales_equal_the_golden_exponents(fmt: Format, golden) -> None:
    file = golden("scales")
    exponents = file["tables"][f"tensor_pow2_floor_{fmt.name.lower()}"]["exponent"]
    scale = scaling.quant_scale_of(from_bits(hexes(file["amax_f32_hex"])), fmt, TENSOR_POW2)
    assert scale.tolist() == [2.0**e for e in exponents]


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=repr)
def test_e8m0_bytes_equal_the_golden_bytes(fmt: Format, golden) -> None:
    file = golden("scales")
    amax = from_bits(hexes(file["amax_f32_hex"]))
    expected = file["tables"][f"e8m0_roundup_{fmt.name.lower()}"]["byte"]
    assert scaling.e8m0_byte_up(amax, fmt).tolist() == expected
    assert scaling.quant_scale_of(amax, fmt, E8M0_UP).tolist() == [2.0 ** (127 - b) for b in expected]


SPECIAL_AMAX = [0, 1, 0x400000, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, formats.E2M1FN, FP16], ids=repr)
def test_scales_equal_the_scalar_twin(rule: ScaleRule, fmt: Format) -> None:
    random = np.random.default_rng(0).integers(0, 0x7F800000, 200)
    amax = SPECIAL_AMAX + [int(b) for b in random] + [reference.bits_of(fmt.max) + d for d in (-1, 0, 1)]
    scale = scaling.quant_scale_of(from_bits(amax), fmt, rule)
    expected = [reference.quant_scale(b, fmt, rule) for b in amax]
    assert to_bits(scale.nan_to_num(nan=-1.0)) == [
        b if b != reference.NAN else reference.bits_of(-1.0) for b in expected
    ]
    positive = [b for b in expected if b < reference.INFINITY]
    assert to_bits(scaling.dequant_scale_of(from_bits(positive))) == [reference.dequant_scale(b) for b in positive]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 0x7FFFFFFF), st.sampled_from([CURRENT, CURRENT_POW2, TENSOR_POW2]), st.sampled_from([E4M3FN, E5M2])
)
def test_any_amax_gives_a_usable_scale(bits: int, rule: ScaleRule, fmt: Format) -> None:
    # case 1: scale and inverse are finite and positive whatever the amax, so nothing becomes 0/0
    amax = from_bits([bits])
    scale = scaling.quant_scale_of(amax, fmt, rule)
    inverse = scaling.dequant_scale_of(scale)
    assert 0 < scale.item() < float("inf")
    assert 0 < inverse.item() < float("inf")
    if rule is not CURRENT and amax.isfinite():
        assert (amax * scale).item() <= fmt.max


def test_tensor_amax_sees_infinity_and_nan_and_an_empty_tensor_has_none() -> None:
    assert scaling.tensor_amax(torch.tensor([1.0, -3.0])).item() == 3.0
    assert scaling.tensor_amax(torch.tensor([1.0, -float("inf")])).item() == float("inf")
    assert scaling.tensor_amax(torch.tensor([float("inf"), float("nan")])).isnan()
    assert scaling.tensor_amax(torch.empty(0, 3)).item() == 0.0  # case 54


def test_scale_is_float32_whatever_the_input() -> None:
    # case 3: 448 / 0.005 is beyond float16
    amax = scaling.tensor_amax(torch.full((16, 16), 0.005, dtype=torch.float16))
    scale = scaling.quant_scale_of(amax, E4M3FN, CURRENT)
    assert scale.dtype is torch.float32
    assert scale.item() == pytest.approx(8.958e4, rel=1e-4)
    assert scaling.dequant_scale_of(scale).item() == pytest.approx(1.1163e-5, rel=1e-4)

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.numerics import packing
from narrowgauge.numerics.kernels import cpu_packing


def codes_of(bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_even_column_lies_in_the_low_nibble() -> None:
    packed = packing.pack(torch.tensor([[0x1, 0x2, 0xF, 0x0], [0x7, 0x8, 0x9, 0xA]], dtype=torch.uint8), 4)
    assert packed.tolist() == [[0x21, 0x0F], [0x87, 0xA9]]


def test_four_codes_of_6_bits_are_the_bits_of_three_bytes_from_the_lowest_on() -> None:
    codes = [0b000001, 0b100010, 0b111100, 0b010101]
    number = sum(code << 6 * i for i, code in enumerate(codes))
    packed = packing.pack(torch.tensor(codes, dtype=torch.uint8), 6)
    assert bytes(packed.tolist()) == number.to_bytes(3, "little")


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("columns", [0, 1, 2, 3, 4, 5, 6, 7, 8, 257, 1024])
@pytest.mark.parametrize("leading", [(), (3,), (2, 5), (0,)], ids=str)
def test_every_code_comes_back_from_the_kernel_and_from_its_twin(bits: int, columns: int, leading: tuple) -> None:
    codes = codes_of(bits, *leading, columns)
    width = packing.packed_width(columns, bits)
    packed = packing.pack_in_torch(codes, bits)
    assert packed.shape == (*leading, width) and width == -(-columns * bits // 8)
    assert torch.equal(packing.unpack_in_torch(packed, bits, columns), codes)
    assert torch.equal(packing.unpack(packing.pack(codes, bits), bits, columns), codes)
    if codes.numel():
        assert torch.equal(cpu_packing.pack(codes, bits, width), packed)
        assert torch.equal(cpu_packing.unpack(packed, bits, columns), codes)


@pytest.mark.parametrize("bits", [4, 6])
def test_padding_is_code_0_and_higher_bits_are_ignored(bits: int) -> None:
    codes = torch.full((3, 33), 255, dtype=torch.uint8)
    low = codes & ((1 << bits) - 1)
    for packed in (packing.pack_in_torch(codes, bits), cpu_packing.pack(codes, bits, packing.packed_width(33, bits))):
        assert torch.equal(packing.unpack(packed, bits, 33), low)
        unused = packing.packed_width(33, bits) * 8 - 33 * bits
        assert (packed[:, -1] >> (8 - unused) == 0).all()


@pytest.mark.parametrize("bits", [4, 6])
def test_strided_codes_are_packed_in_logical_order(bits: int) -> None:
    codes = codes_of(bits, 70, 90)
    for view in (codes.t(), codes[:, ::2], codes[1::3, 5:]):
        assert torch.equal(packing.pack(view, bits), packing.pack(view.contiguous(), bits))
        packed = packing.pack(view, bits)
        wide = torch.zeros(packed.shape[0], 2 * packed.shape[1], dtype=torch.uint8)
        wide[:, ::2] = packed
        assert torch.equal(packing.unpack(wide[:, ::2], bits, view.shape[1]), view)


def test_what_cannot_be_packed_says_what_was_expected() -> None:
    codes = codes_of(4, 2, 8)
    with pytest.raises(NarrowgaugeError, match="4 or 6 bits"):
        packing.pack(codes, 8)
    with pytest.raises(NarrowgaugeError, match="expected codes in uint8"):
        packing.pack(codes.int(), 4)
    with pytest.raises(NarrowgaugeError, match="at least one dimension"):
        packing.pack(codes[0, 0], 4)
    with pytest.raises(NarrowgaugeError, match=r"12 columns of 4-bit codes take 6 bytes a row, found 4"):
        packing.unpack(packing.pack(codes, 4), 4, 12)


@pytest.mark.parametrize("bits", [4, 6])
def test_packing_is_an_operator_that_passes_torchs_check(bits: int) -> None:
    codes = codes_of(bits, 3, 50)
    torch.library.opcheck(torch.ops.narrowgauge.pack.default, (codes, bits))
    torch.library.opcheck(torch.ops.narrowgauge.unpack.default, (packing.pack(codes, bits), bits, 50))
    compiled = torch.compile(
        lambda c: packing.unpack(packing.pack(c, bits), bits, 50), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(codes), codes)
    with FakeTensorMode():
        assert packing.pack(torch.empty(3, 50, dtype=torch.uint8), bits).shape == (3, packing.packed_width(50, bits))

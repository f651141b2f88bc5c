"""Which products of narrow formats a CUDA device runs in hardware, through torch's scaled_mm, and why it cannot.

A table over casts and machines, without tensors. Sources: torch's ScaledBlas.cpp and CUDABlas.cpp, for what scaled_mm
takes (2.11 to 2.14); the cuBLAS documentation of cublasLtMatmul, for the scale modes of a compute capability.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from narrowgauge.numerics.formats import E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2, Format
from narrowgauge.numerics.scaling import NVFP4
from narrowgauge.recipes.spec import CastSpec

FP8_CAPABILITY: tuple[int, int] = (8, 9)  # Ada Lovelace: the first with FP8 tensor cores (CUDA C++ Programming Guide)
HOPPER = 9  # the only one with float32 scales of blocks of 128
BLACKWELL = 10  # the first with E8M0 scales of blocks of 32, and E4M3 scales of blocks of 16
CUDA_OF_BLOCKS_OF_128 = (12, 9)  # cuBLAS 12.9; scales of rows in cuBLAS came with it
CUDA_OF_SMALL_BLOCKS = (12, 8)
ASSUMED_CUDA = (12, 9)  # of a torch built without CUDA, whose devices are fake
# where torch itself has a kernel for scales of rows, with bf16 results and E4M3FN on the right
MAJORS_OF_ROW_KERNELS = (8, 9, 10, 12)

# what the codes of a format are multiplied as: E4M3FN holds every value of the formats of 4 and 6 bits
_MULTIPLIED_AS = {E4M3FN: E4M3FN, E5M2: E5M2, E2M1FN: E4M3FN, E2M3FN: E4M3FN, E3M2FN: E4M3FN}


class Scaling(Enum):
    """How scaled_mm reads the scales of one operand; the values are names of torch.nn.functional.ScalingType."""

    TENSOR = "TensorWise"
    ROW = "RowWise"
    BLOCK_1X128 = "BlockWise1x128"
    BLOCK_128X128 = "BlockWise128x128"
    MX = "BlockWise1x32"
    NVFP4 = "BlockWise1x16"


class Machine(NamedTuple):
    """What decides: compute capability, and the CUDA version that torch is built for (None: it is built for ROCm)."""

    capability: tuple[int, int]
    cuda: tuple[int, int] | None

    def __str__(self) -> str:
        return f"compute capability {self.capability[0]}.{self.capability[1]}"


@dataclass(frozen=True)
class Route:
    """How scaled_mm multiplies two operands.

    left, right: how it reads their scales. formats: what their codes are multiplied as; where that is not their own
    format, it holds all its values. row_dtypes: the result dtypes in which the device applies scales of rows by itself.
    """

    left: Scaling
    right: Scaling
    formats: tuple[Format, Format]
    row_dtypes: tuple[torch.dtype, ...] = ()


def machine_of(device: torch.device) -> Machine:
    """The machine of a CUDA device. One that is not there (fake tensors) is taken for the least with FP8 products."""
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else FP8_CAPABILITY
    if torch.version.hip is not None:
        return Machine(capability, None)
    if torch.version.cuda is None:
        return Machine(capability, ASSUMED_CUDA)
    major, minor = torch.version.cuda.split(".")[:2]
    return Machine(capability, (int(major), int(minor)))


def native_of(left: CastSpec, right: CastSpec, machine: Machine) -> Route | str:
    """The route of left @ right.T through the hardware of `machine`, or in words why there is none.

    left, right: the casts of narrow matrices as [outer dimension, dimension that is summed over]: a tile's columns lie
    along the sum. Where blocks of a multiple of the hardware's size share a scale, the hardware gets it repeated.
    """
    if machine.cuda is None:
        return "this torch is built for ROCm, whose products of narrow formats are not used"
    if machine.capability < FP8_CAPABILITY:
        return f"{machine} has no FP8 products (8.9 and later have)"
    if NVFP4 in (left.scale, right.scale):
        return _nvfp4(left, right, machine, machine.cuda)
    for spec in (left, right):
        if spec.format not in _MULTIPLIED_AS:
            return f"scaled_mm multiplies no {spec.format}"
    formats = (_MULTIPLIED_AS[left.format], _MULTIPLIED_AS[right.format])
    if formats == (E5M2, E5M2):
        return "the hardware multiplies no E5M2 by E5M2"
    if not left.in_blocks and not right.in_blocks:
        return Route(Scaling.TENSOR, Scaling.TENSOR, formats)
    if left.granularity.columns is None and right.granularity.columns is None:
        return Route(Scaling.ROW, Scaling.ROW, formats, _row_dtypes(formats[1], machine, machine.cuda))
    if machine.capability[0] == HOPPER:
        return _blocks_of_128(left, right, formats, machine, machine.cuda)
    return _blocks_of_32(left, right, formats, machine, machine.cuda)


def _row_dtypes(right: Format, machine: Machine, cuda: tuple[int, int]) -> tuple[torch.dtype, ...]:
    major = machine.capability[0]
    if major == HOPPER and cuda >= CUDA_OF_BLOCKS_OF_128:
        return (torch.bfloat16, torch.float16, torch.float32)
    return (torch.bfloat16,) if major in MAJORS_OF_ROW_KERNELS and right is E4M3FN else ()


def _blocks_of_128(
    left: CastSpec, right: CastSpec, formats: tuple[Format, Format], machine: Machine, cuda: tuple[int, int]
) -> Route | str:
    if not _divides(128, left, right):
        return f"{machine} multiplies blocks of 128 along the sum, not {_widths(left, right)}"
    if E5M2 in formats:
        return "scaled_mm multiplies blocks of 128 of E4M3FN and what it holds, not of E5M2"
    if cuda < CUDA_OF_BLOCKS_OF_128:
        return f"CUDA {cuda[0]}.{cuda[1]} has no products in blocks of 128 (12.9 and later have)"
    tall = [spec.granularity.rows is None or spec.granularity.rows % 128 == 0 for spec in (left, right)]
    # 128x128 by 128x128 is the one pair that the hardware lacks
    return Route(
        Scaling.BLOCK_128X128 if tall[0] and not tall[1] else Scaling.BLOCK_1X128,
        Scaling.BLOCK_128X128 if tall[1] else Scaling.BLOCK_1X128,
        formats,
    )


def _blocks_of_32(
    left: CastSpec, right: CastSpec, formats: tuple[Format, Format], machine: Machine, cuda: tuple[int, int]
) -> Route | str:
    if machine.capability[0] < BLACKWELL:
        return f"{machine} has no products in blocks (9.0 has those of 128, 10.0 and later those of 32 and 16)"
    if not _divides(32, left, right):
        return f"{machine} multiplies blocks of 32 along the sum, not {_widths(left, right)}"
    if not (left.has_pow2_scale and right.has_pow2_scale):
        return f"{machine} scales blocks by powers of two, not by float32 numbers"
    if cuda < CUDA_OF_SMALL_BLOCKS:
        return f"CUDA {cuda[0]}.{cuda[1]} has no products in blocks of 32 (12.8 and later have)"
    return Route(Scaling.MX, Scaling.MX, formats)


def _nvfp4(left: CastSpec, right: CastSpec, machine: Machine, cuda: tuple[int, int]) -> Route | str:
    if left.scale is not right.scale:
        return "the hardware multiplies NVFP4 by NVFP4 only"
    if machine.capability[0] < BLACKWELL:
        return f"{machine} has no NVFP4 products (10.0 and later have)"
    if not _divides(16, left, right):
        return f"{machine} multiplies NVFP4 blocks of 16 along the sum, not {_widths(left, right)}"
    if cuda < CUDA_OF_SMALL_BLOCKS:
        return f"CUDA {cuda[0]}.{cuda[1]} has no NVFP4 products (12.8 and later have)"
    return Route(Scaling.NVFP4, Scaling.NVFP4, (E2M1FN, E2M1FN))


def _divides(width: int, left: CastSpec, right: CastSpec) -> bool:
    sizes = (left.granularity.columns, right.granularity.columns)
    return all(size is None or size % width == 0 for size in sizes)


def _widths(left: CastSpec, right: CastSpec) -> str:
    sizes = dict.fromkeys(spec.granularity.columns for spec in (left, right) if spec.granularity.columns is not None)
    return "of " + " and ".join(str(size) for size in sizes)

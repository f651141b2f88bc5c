"""Run as a program: compiles the Triton kernels of rows on the wire for GPU architectures, which needs no GPU."""

from __future__ import annotations

import sys

from triton_compiled import build

from narrowgauge.numerics.formats import E2M1FN, E4M3FN, INT8
from narrowgauge.numerics.kernels import triton_wire_kernels as kernels
from narrowgauge.numerics.kernels.triton_wire import constants_of, encoding_constants_of
from narrowgauge.numerics.kernels.wire import WireFormat
from narrowgauge.numerics.scaling import CURRENT, E8M0_UP

# wire format, rounded stochastically, with a residual
CASES = (
    (WireFormat(E4M3FN, 128, E8M0_UP), False, False),
    (WireFormat(E4M3FN, 128, CURRENT), True, True),
    (WireFormat(E2M1FN, 32, CURRENT), True, True),
    (WireFormat(E2M1FN, 128, E8M0_UP), False, False),
    (WireFormat(INT8, 96, E8M0_UP), True, False),
    (WireFormat(INT8, 4096, CURRENT), False, True),
)
POINTERS = {
    "x": "*bf16", "codes": "*u8", "rows_of_codes": "*u8", "residual": "*fp32", "key": "*i64", "total": "*fp32",
    "out": "*bf16", "divisor": "fp32",
}  # fmt: skip


def build_all(target: int) -> list[str]:
    """PTX of the kernels in forms that between them use every function."""
    built = []
    for form, stochastic, feeds_back in CASES:
        constants = constants_of(form)
        encoding = {**encoding_constants_of(form), "STOCHASTIC": stochastic, "FEEDBACK": feeds_back}
        for kernel, more in (
            (kernels.encode_kernel, encoding),
            (kernels.decode_kernel, {}),
            (kernels.reduce_kernel, {**encoding, "TOTAL": True, "CODES": True}),
        ):
            known = {**constants, **more}
            signature = {name: POINTERS.get(name, "i32") for name in kernel.arg_names if name not in known}
            built.append(build(kernel, signature, known, target))
    return built


if __name__ == "__main__":
    for architecture in map(int, sys.argv[1:]):
        for ptx in build_all(architecture):
            assert f".target sm_{architecture}" in ptx
            assert "fma.rn.f32" not in ptx  # a contracted sum would round once where the twin rounds twice
            assert ".ftz" not in ptx  # subnormal scales and values count
            assert "div.full" not in ptx and "div.approx" not in ptx and "rcp.approx" not in ptx

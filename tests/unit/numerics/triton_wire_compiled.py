"""The forms in which the Triton kernels of rows on the wire are compiled for a GPU."""

from __future__ import annotations

from triton_builds import Builder

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


def build_all(build: Builder) -> None:
    """The kernels in forms that between them use every function."""
    for form, stochastic, feeds_back in CASES:
        constants = constants_of(form)
        encoding = {**encoding_constants_of(form), "STOCHASTIC": stochastic, "FEEDBACK": feeds_back}
        for kernel, more in (
            (kernels.encode_kernel, encoding),
            (kernels.decode_kernel, {}),
            (kernels.reduce_kernel, {**encoding, "TOTAL": True, "CODES": True}),
        ):
            known = {**constants, **more}
            build(kernel, {name: POINTERS.get(name, "i32") for name in kernel.arg_names if name not in known}, known)

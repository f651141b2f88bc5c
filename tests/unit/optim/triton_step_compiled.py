"""Run as a program: compiles the Triton step for the GPU architectures given, which needs no GPU."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))

from triton_compiled import build

from narrowgauge.optim.kernels.table import GradKind, MomentKind, ParamKind, RuleCode
from narrowgauge.optim.kernels.triton_step import step_kernel

PARAMS = {ParamKind.FLOAT: "*fp32"}
MASTERS = {ParamKind.RESIDUAL: "*i8", ParamKind.REMAINDER: "*i16"}
GRADS = {GradKind.FLOAT: "*fp32", GradKind.BFLOAT: "*bf16", GradKind.E4M3: "*u8", GradKind.E5M2: "*u8"}
MOMENTS = {
    MomentKind.NONE: "*u8", MomentKind.FLOAT: "*fp32", MomentKind.BFLOAT: "*bf16", MomentKind.SIGNED: "*i8",
    MomentKind.UNSIGNED: "*u8",
}  # fmt: skip
WIDE, SIGNED, UNSIGNED, NONE = MomentKind.FLOAT, MomentKind.SIGNED, MomentKind.UNSIGNED, MomentKind.NONE
# rule, whether weight decay joins the gradient, first moment, second moment
RULES = (
    (RuleCode.ADAM, False, SIGNED, UNSIGNED),
    (RuleCode.ADAM, True, MomentKind.BFLOAT, WIDE),
    (RuleCode.SGD, True, SIGNED, NONE),
    (RuleCode.SGD, False, NONE, NONE),
    (RuleCode.LION, False, SIGNED, NONE),
    (RuleCode.MUON, False, SIGNED, NONE),
    (RuleCode.DESCEND, False, NONE, NONE),
)


def compiled(
    rule: RuleCode, l2: bool, first: MomentKind, second: MomentKind, param: ParamKind, grad: GradKind, target: int
) -> str:
    """PTX of the step in one combination of formats."""
    signature = {
        "param": PARAMS.get(param, "*bf16"), "master": MASTERS.get(param, "*u8"), "grad": GRADS[grad],
        "grad_scale": "*fp32", "first": MOMENTS[first], "first_scale": "*fp32", "first_amax": "*i32",
        "second": MOMENTS[second], "second_scale": "*fp32", "second_amax": "*i32", "key": "*i64", "stream": "i32",
        **dict.fromkeys(("columns", "width", "across", "tiles"), "i64"),
        **dict.fromkeys((f"h{k}" for k in range(9)), "fp32"),
    }  # fmt: skip
    constants = {
        "RULE": int(rule), "L2": l2, "PARAM": int(param), "GRAD": int(grad), "FIRST": int(first),
        "SECOND": int(second), "TILES": 16, "WIDTH": 128,
    }  # fmt: skip
    return build(step_kernel, signature, constants, target)


def build_all(target: int) -> list[str]:
    """PTX of every parameter with every gradient, and of every rule."""
    (adam, l2, first, second), *others = RULES
    pairs = [(param, GradKind(i % len(GradKind))) for i, param in enumerate(ParamKind)]
    built = [compiled(adam, l2, first, second, param, grad, target) for param, grad in pairs]
    stored = itertools.product(others, [(ParamKind.RESIDUAL, GradKind.E4M3)])
    return built + [compiled(*rule, *kinds, target) for rule, kinds in stored]


if __name__ == "__main__":
    for architecture in map(int, sys.argv[1:]):
        for ptx in build_all(architecture):
            assert f".target sm_{architecture}" in ptx
            assert "fma.rn.f32" not in ptx  # a contracted product would round once where the twin rounds twice
            assert ".ftz" not in ptx  # subnormal values count
            assert all(rough not in ptx for rough in ("div.full", "div.approx", "rcp.approx", "sqrt.approx"))

"""The forms in which the Triton step is compiled for a GPU."""

from __future__ import annotations

from triton_builds import Builder

from narrowgauge.optim.kernels.table import GradKind, MomentKind, ParamKind, RuleCode
from narrowgauge.optim.kernels.triton_step import step_kernel

PARAMS = {ParamKind.FLOAT: "*fp32"}
MASTERS = {ParamKind.RESIDUAL: "*i8", ParamKind.REMAINDER: "*i16"}
GRADS = {
    GradKind.FLOAT: "*fp32", GradKind.BFLOAT: "*bf16", GradKind.HALF: "*fp16", GradKind.E4M3: "*u8",
    GradKind.E5M2: "*u8",
}  # fmt: skip
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


def build_step(
    build: Builder, rule: RuleCode, l2: bool, first: MomentKind, second: MomentKind, param: ParamKind, grad: GradKind
) -> None:
    """The step in one combination of formats."""
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
    build(step_kernel, signature, constants)


def build_all(build: Builder) -> None:
    """Every parameter with every gradient, and every rule."""
    adam, *others = RULES
    for i, param in enumerate(kind for kind in ParamKind if kind < ParamKind.SCALED):
        build_step(build, *adam, param, GradKind(i % len(GradKind)))
    for rule in others:
        build_step(build, *rule, ParamKind.RESIDUAL, GradKind.E4M3)

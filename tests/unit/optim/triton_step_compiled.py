"""The forms in which the Triton step is compiled for a GPU."""

from __future__ import annotations

from triton_builds import Builder

from narrowgauge.numerics.formats import E4M3FN, FP16
from narrowgauge.numerics.scaling import TENSOR_POW2
from narrowgauge.optim.kernels.table import Coding, GradKind, MomentKind, ParamKind, RuleCode
from narrowgauge.optim.kernels.triton_step import step_kernel

PARAMS = {ParamKind.FLOAT: "*fp32", ParamKind.SCALED: "*i16", ParamKind.COPIED: "*u8"}
MASTERS = {ParamKind.COPIED: "*i16", ParamKind.RESIDUAL: "*i8", ParamKind.REMAINDER: "*i16"}
GRADS = {
    GradKind.FLOAT: "*fp32", GradKind.BFLOAT: "*bf16", GradKind.HALF: "*fp16", GradKind.E4M3: "*u8",
    GradKind.E5M2: "*u8",
}  # fmt: skip
MOMENTS = {
    MomentKind.NONE: "*u8", MomentKind.FLOAT: "*fp32", MomentKind.BFLOAT: "*bf16", MomentKind.SIGNED: "*i8",
    MomentKind.UNSIGNED: "*u8", MomentKind.SCALED: "*u8",
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

_E4M3, _HALF = Coding(E4M3FN, TENSOR_POW2, False), Coding(FP16, TENSOR_POW2, False)
_MOMENTS = {"FIRST": _E4M3, "SECOND": Coding(FP16, TENSOR_POW2, True)}
# of a parameter alone, and beside its master
CODES = ({"PARAM": _HALF, "MASTER": _HALF, **_MOMENTS}, {"PARAM": _E4M3, "MASTER": _HALF, **_MOMENTS})


def build_step(
    build: Builder,
    rule: RuleCode,
    l2: bool,
    first: MomentKind,
    second: MomentKind,
    param: ParamKind,
    grad: GradKind,
    measure: bool = False,
) -> None:
    """The step in one combination of formats; what has one scale for the whole in FP8-LM's."""
    codes = {f"{name}_CODE": code.number for name, code in CODES[param == ParamKind.COPIED].items()}
    signature = {
        "param": PARAMS.get(param, "*bf16"), "master": MASTERS.get(param, "*u8"), "grad": GRADS[grad],
        "grad_scale": "*fp32", "first": MOMENTS[first], "first_scale": "*fp32", "first_amax": "*i32",
        "second": "*i16" if second == MomentKind.SCALED else MOMENTS[second], "second_scale": "*fp32",
        "second_amax": "*i32", **dict.fromkeys(("param_scale", "master_scale", "scales"), "*fp32"),
        "found": "*i32", "key": "*i64", "stream": "i32",
        **dict.fromkeys(("columns", "width", "across", "tiles"), "i64"),
        **dict.fromkeys((f"h{k}" for k in range(9)), "fp32"),
    }  # fmt: skip
    constants = {
        "RULE": int(rule), "L2": l2, "PARAM": int(param), "GRAD": int(grad), "FIRST": int(first),
        "SECOND": int(second), **codes, "MEASURE": measure, "TILES": 16, "WIDTH": 128,
    }  # fmt: skip
    build(step_kernel, signature, constants)


def build_all(build: Builder) -> None:
    """Every parameter with every gradient, and every rule."""
    adam, *others = RULES
    for i, param in enumerate(kind for kind in ParamKind if kind < ParamKind.SCALED):
        build_step(build, *adam, param, GradKind(i % len(GradKind)))
    for param in (ParamKind.SCALED, ParamKind.COPIED):
        for measure in (False, True):
            build_step(build, RuleCode.ADAM, False, MomentKind.SCALED, MomentKind.SCALED, param, GradKind.E4M3, measure)
    for rule in others:
        build_step(build, *rule, ParamKind.RESIDUAL, GradKind.E4M3)

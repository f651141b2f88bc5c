"""Weights in FP8 as transformers and vLLM read them: 128x128 blocks, `weight_scale_inv`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import ConversionError
from narrowgauge.numerics.formats import E4M3FN
from narrowgauge.numerics.granularity import Block
from narrowgauge.recipes.cast_spec import CastSpec
from narrowgauge.tensors.fp8_weights import BLOCK
from narrowgauge.tensors.quantized import quantize

# layers whose weights vLLM joins to one: they are in FP8 together, or none of them is
_GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
_HEAD = "lm_head"


def to_fp8(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, the `quantization_config` of config.json) for a Llama's state dict in float32.

    Weights of the blocks' linear layers become E4M3 codes, and beside `layer.weight` stands `layer.weight_scale_inv`,
    float32 [N / 128, K / 128], that a block is to be multiplied by. All else is bfloat16: head, embedding, norms,
    biases, and layers whose sizes are no multiples of 128, since both readers split a cut-off block wrongly or refuse
    it; the config lists the layers. Raises ConversionError where no layer is left.
    """
    prefixes = sorted({name.partition(".self_attn.")[0] for name in weights if ".self_attn." in name})
    return layers_to_fp8(
        weights, [[f"{prefix}.{layer}" for layer in group] for prefix in prefixes for group in _GROUPS], [_HEAD]
    )


def layers_to_fp8(
    weights: Mapping[str, Tensor], groups: Iterable[Sequence[str]], kept: Iterable[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As `to_fp8`, of any model's state dict in float32.

    groups: names of linear layers that are in FP8 together, or none of them is. kept: names of other modules that
    readers would look for in FP8, and that stay in bfloat16. A tied head is among them: transformers would look for its
    scale. Raises ConversionError where no layer is left.
    """
    kept = list(kept)
    in_fp8: set[str] = set()
    for group in groups:
        if all(_has_whole_blocks(weights[f"{layer}.weight"]) for layer in group):
            in_fp8.update(group)
        else:
            kept += group
    if not in_fp8:
        raise ConversionError(
            f"no layer's weight consists of whole blocks of {BLOCK[0]}x{BLOCK[1]}: export in bf16, or train a model "
            "whose width, ffn_width and width of keys and values are multiples of 128"
        )
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name.removesuffix(".weight") in in_fp8:
            q = quantize(weight, CastSpec(E4M3FN, Block(*BLOCK)))
            tensors |= {name: q.codes, f"{name}_scale_inv": q.dequant_scale}
        else:
            tensors[name] = weight.to(torch.bfloat16) if weight.is_floating_point() else weight
    return tensors, {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": kept,
    }


def _has_whole_blocks(weight: Tensor) -> bool:
    return all(size % block == 0 for size, block in zip(weight.shape, BLOCK, strict=True))

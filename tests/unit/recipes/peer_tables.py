"""The tables of docs/peers.md, from the options that the code reads.

`python tests/unit/recipes/peer_tables.py` writes them anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from narrowgauge.recipes.compat import accelerate, torchao, transformer_engine
from narrowgauge.recipes.compat.options import Options

PAGE = Path(__file__).resolve().parents[3] / "docs" / "peers.md"
TABLES: dict[str, Options] = {
    "torchao: `Float8LinearConfig`": torchao.FLOAT8_LINEAR,
    "torchao: `CastConfig`, in the `cast_config_` fields": torchao.CAST,
    "torchao: `Float8GemmConfig`, in the `gemm_config_` fields": torchao.GEMM,
    "torchao: `MXFP8TrainingOpConfig`": torchao.MXFP8,
    "torchao: `Float8TrainingOpConfig`": torchao.FLOAT8_OP,
    "torchao: `NVFP4TrainingConfig`": torchao.NVFP4,
    **{f"TransformerEngine: `{kind}`": options for kind, options in transformer_engine.RECIPES.items()},
    "TransformerEngine: `QParams`, in the `_quant_` fields": transformer_engine.QUANT,
    "TransformerEngine: `MMParams`, in the `fp8_gemm_` fields": transformer_engine.MATMUL,
    "Accelerate: a file": accelerate.FILE,
    "Accelerate: `fp8_config` of any backend": {"backend": accelerate.BACKEND},
    "Accelerate: `TERecipeKwargs`, or `fp8_config` with `backend: TE`": accelerate.TE,
    "Accelerate: `AORecipeKwargs`, or `fp8_config` with `backend: AO`": accelerate.AO,
    "Accelerate: `MSAMPRecipeKwargs`, or `fp8_config` with `backend: MSAMP`": accelerate.MSAMP,
}
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"


def markdown() -> str:
    """Every table, under a heading of its own."""
    return "\n".join(f"### {title}\n\n{_table(options)}" for title, options in TABLES.items())


def names() -> str:
    """The table of recipe names."""
    rows = [f"| `{theirs}` | `{_call(*ours)}` |\n" for theirs, ours in torchao.NAMES.items()]
    return "### torchao: recipe names\n\n| there | here |\n|---|---|\n" + "".join(rows)


def page(text: str) -> str:
    """The page with its tables renewed."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{names()}\n{markdown()}\n{END}{after}"


def _table(options: Options) -> str:
    return "| there | default | here |\n|---|---|---|\n" + "".join(_rows(options))


def _rows(options: Options) -> Iterator[str]:
    for name, option in options.items():
        # the launcher's prefix is said once, in the text
        also = [alias for alias in option.aliases if not alias.startswith("fp8_")]
        called = ", ".join(f"`{each}`" for each in (name, *also))
        yield f"| {called} | {_default(option.default)} | {option.ours} |\n"


def _default(value: Any) -> str:
    if value == {}:
        return "see there"
    if isinstance(value, torch.dtype):
        return f"`{value}`"
    return f"`{value!r}`" if not isinstance(value, str) else f"`{value}`"


def _call(name: str, fields: dict[str, Any]) -> str:
    given = "".join(f", {field}={str(value) if isinstance(value, tuple) else repr(str(value))}"
                    for field, value in fields.items())  # fmt: skip
    return f'ng.recipe("{name}"{given})'.replace("'", '"')


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

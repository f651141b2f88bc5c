"""What a GPT is made of: one frozen dataclass, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from narrowgauge.errors import ConfigError, closest


class Activation(StrEnum):
    """SWIGLU: `down(silu(gate) * up)` (Shazeer 2020, arXiv:2002.05202); GELU: `down(gelu(up))`, the exact erf form."""

    SWIGLU = "swiglu"
    GELU = "gelu"


class Norm(StrEnum):
    """RMSNORM (Zhang and Sennrich 2019, arXiv:1910.07467) or LAYERNORM, always before the sublayer."""

    RMSNORM = "rmsnorm"
    LAYERNORM = "layernorm"


class Positions(StrEnum):
    """ROPE: rotary embedding of queries and keys (arXiv:2104.09864); LEARNED: a table added to the token embedding."""

    ROPE = "rope"
    LEARNED = "learned"


SWIGLU_WIDTH_MULTIPLE = 64  # so that the derived width fits every GEMM's alignment (16) and blocks of 32


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a decoder-only transformer.

    vocab_size: rows of the token embedding and of the head. layers, width, heads: blocks, features of the residual
    stream, query heads (a head has width / heads features). kv_heads: heads of keys and values, each shared by
    heads / kv_heads query heads; None: as many as `heads`. ffn_width: hidden features of a feed-forward network; None:
    4 width for GELU, 8/3 width rounded up to a multiple of 64 for SwiGLU. context: longest sequence in tokens.

    attention_bias, mlp_bias, norm_bias: whether those layers have biases (norm_bias: LayerNorm only).
    swiglu_limit: SwiGLU's gate is clamped to at most this, its up to at most this in magnitude; None: not at all.
    experts: feed-forward networks per block; 0: dense. experts_per_token: how many of them each token visits.
    load_balancing: coefficient of the load-balancing loss that is added to the training loss.
    init_std: standard deviation of weights and embeddings. scaled_residual_init: the two projections that write into
    the residual stream start at init_std / sqrt(2 layers) (GPT-2).

    Raises ConfigError for values out of range and for unknown names.
    """

    vocab_size: int
    layers: int
    width: int
    heads: int
    context: int
    kv_heads: int | None = None
    ffn_width: int | None = None
    activation: Activation | str = Activation.SWIGLU
    norm: Norm | str = Norm.RMSNORM
    norm_eps: float = 1e-5
    positions: Positions | str = Positions.ROPE
    rope_theta: float = 10000.0
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    swiglu_limit: float | None = None
    experts: int = 0
    experts_per_token: int = 2
    load_balancing: float = 0.01  # Switch Transformer, arXiv:2101.03961, section 2.2
    init_std: float = 0.02
    scaled_residual_init: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "width", "heads", "context"):
            self._check_count(name, 1)
        for name in ("kv_heads", "ffn_width"):
            if getattr(self, name) is not None:
                self._check_count(name, 1)
        self._check_count("experts", 0)
        for name, kind in (("activation", Activation), ("norm", Norm), ("positions", Positions)):
            object.__setattr__(self, name, _member(kind, name, getattr(self, name)))
        for name in ("tied_embeddings", "attention_bias", "mlp_bias", "norm_bias", "scaled_residual_init"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected true or false")
        for name, lowest_is_allowed in (
            ("norm_eps", False),
            ("rope_theta", False),
            ("init_std", False),
            ("load_balancing", True),
        ):
            self._check_number(name, lowest_is_allowed)
        self._check_heads()
        if self.swiglu_limit is not None:
            self._check_number("swiglu_limit", zero_is_allowed=False)
            if self.activation is not Activation.SWIGLU:
                raise ConfigError(f"swiglu_limit={self.swiglu_limit} with activation={self.activation}: leave it out")
        if self.experts:
            self._check_count("experts_per_token", 1)
            if self.experts_per_token > self.experts:
                raise ConfigError(
                    f"experts_per_token={self.experts_per_token} is more than experts={self.experts}: lower it"
                )
        if self.norm_bias and self.norm is Norm.RMSNORM:
            raise ConfigError("norm_bias=True, but RMSNorm has no bias: set norm='layernorm', or norm_bias=False")

    def _check_count(self, name: str, lowest: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ConfigError(f"{name}={value!r}: expected a whole number, at least {lowest}")

    def _check_number(self, name: str, zero_is_allowed: bool) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name}={value!r}: expected a number")
        if not (value > 0 or (zero_is_allowed and value == 0)) or value == float("inf"):
            raise ConfigError(f"{name}={value!r}: expected a finite number {'>= 0' if zero_is_allowed else '> 0'}")

    def _check_heads(self) -> None:
        if self.width % self.heads:
            raise ConfigError(
                f"width={self.width} is no multiple of heads={self.heads}: change one, e.g. width="
                f"{-(-self.width // self.heads) * self.heads}"
            )
        if self.heads % self.key_value_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ConfigError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}: use one of {divisors}")
        if self.positions is Positions.ROPE and self.head_width % 2:
            raise ConfigError(
                f"width / heads = {self.head_width} is odd, and rotary positions turn pairs of features: "
                "change width or heads, or set positions='learned'"
            )

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        """`kv_heads` with its default filled in."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden_width(self) -> int:
        """`ffn_width` with its default filled in."""
        if self.ffn_width is not None:
            return self.ffn_width
        if self.activation is Activation.GELU:
            return 4 * self.width
        return -(-8 * self.width // (3 * SWIGLU_WIDTH_MULTIPLE)) * SWIGLU_WIDTH_MULTIPLE

    def replace(self, **fields: Any) -> Self:
        """A copy with other fields. Raises ConfigError for a field that no GPTConfig has, naming the closest."""
        check_fields(fields)
        return dataclasses.replace(self, **fields)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, fit for JSON; `from_dict` reads it back."""
        return {k: str(v) if isinstance(v, StrEnum) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The config of `to_dict`. Raises ConfigError for unknown or missing fields."""
        check_fields(fields)
        missing = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name not in fields]
        if missing:
            raise ConfigError(f"the model lacks {', '.join(missing)}: give them, or start from a preset")
        return cls(**fields)


FIELDS = tuple(f.name for f in dataclasses.fields(GPTConfig))


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first name that is no field of a GPTConfig."""
    for field in fields:
        if field not in FIELDS:
            raise ConfigError(f"unknown model field '{field}'{closest(field, FIELDS)}")


def _member(kind: type[StrEnum], field: str, value: Any) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(
            f"{field}={value!r}: expected one of {', '.join(kind)}{closest(str(value), map(str, kind))}"
        ) from None

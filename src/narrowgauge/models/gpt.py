"""A decoder-only transformer in plain PyTorch. It knows no recipe: `narrowgauge.prepare` gives it one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from narrowgauge.errors import DataError, NarrowgaugeError
from narrowgauge.models.attention import Attention, KVCache
from narrowgauge.models.config import Activation, GPTConfig, Norm, Positions
from narrowgauge.models.generate import generate
from narrowgauge.models.mlp import MixtureOfExperts, Router, make_mlp
from narrowgauge.models.rope import Rope
from narrowgauge.ops.experts import GroupedLinear

__all__ = ["GPT", "Activation", "Block", "GPTConfig", "KVCache", "Norm", "Positions"]

IGNORED = -100  # a target that counts for nothing; torch.nn.functional.cross_entropy's default


def make_norm(config: GPTConfig) -> nn.RMSNorm | nn.LayerNorm:
    """A normalization of the residual stream."""
    if config.norm is Norm.RMSNORM:
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.norm_bias)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = make_norm(config)
        self.mlp = MixtureOfExperts(config) if config.experts else make_mlp(config)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, T, width] -> (x [B, T, width], load-balancing loss or None where the block is dense)."""
        x = x + self.attention(self.attention_norm(x), rope, cache)
        y = self.mlp(self.mlp_norm(x))
        y, balance = y if isinstance(y, tuple) else (y, None)
        return x + y, balance


class GPT(nn.Module):
    """Token ids to the next token's logits and, given targets, the mean cross entropy in nats.

    config: the shape. device: where the parameters live; None: torch's default device, so that
    `with torch.device("meta")` builds without memory (then `to_empty(device=...)` and `reset_parameters()` give the
    model that building on that device gives). generator: source of the initial weights; None: torch's global one.
    activation_checkpointing: recompute each block in backward instead of saving its activations.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        target = torch.get_default_device() if device is None else torch.device(device)
        with torch.device("meta"):  # torch's own initialization would only be overwritten, and draw random numbers
            self.embedding = _table(config.vocab_size, config.width)
            self.positions = _table(config.context, config.width) if self._is_learned else None
            self.rope = None if self._is_learned else Rope(config.context, config.head_width, config.rope_theta)
            self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
            self.norm = make_norm(config)
            self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self._tie()
        if target.type != "meta":
            self.to_empty(device=target)
            self.reset_parameters(generator)

    @property
    def _is_learned(self) -> bool:
        return self.config.positions is Positions.LEARNED

    def _tie(self) -> None:
        if self.config.tied_embeddings:
            self.lm_head.weight = self.embedding.weight

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> GPT:
        super()._apply(fn, recurse)
        self._tie()  # a move off the meta device makes new parameters, one for each name
        return self

    def parameter_count(self) -> int:
        """Number of parameters, shared ones counted once."""
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew: normal(0, init_std), norms 1, biases 0, and the rotary tables.

        Values are drawn in float32, on the generator's device, and then cast to the parameter's dtype.
        """
        for name, module in self.named_modules():
            self._reset(name, module, generator)

    def _reset(self, name: str, module: nn.Module, generator: torch.Generator | None) -> None:
        """Draw what belongs to one module itself."""
        _reset_extra_state(module)
        std = self.config.init_std
        if self._is_drawn(name, module):
            is_residual = name.endswith(("attention.out", ".down")) and self.config.scaled_residual_init
            scaled = std / math.sqrt(2 * self.config.layers) if is_residual else std
            _normal_(module, scaled, generator)
        elif isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            module.weight.fill_(1.0)
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()  # type: ignore[operator]

    def _is_drawn(self, name: str, module: nn.Module) -> bool:
        """True where `_reset` draws random weights for the module; those of a tied head are the embedding's."""
        is_tied = name == "lm_head" and self.config.tied_embeddings
        return isinstance(module, (nn.Linear, nn.Embedding, Router, GroupedLinear)) and not is_tied

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, *, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """ids [B, T] int64, targets [B, T] int64 or None -> (logits [B, T, vocab_size], loss: 0-dim float32 or None).

        targets: the token that follows each id; -100 counts for nothing. In training mode a mixture of experts adds
        load_balancing * (mean load-balancing loss of the blocks) to the loss. With a cache, `ids` follow the tokens
        already in it, theirs are added, and logits are of the last position only: [B, 1, vocab_size].
        Raises DataError where the sequence is longer than the context.
        """
        start = 0 if cache is None else cache.length
        self._check_input(ids, start)
        x, balances = self.run_blocks(self.embed(ids, start), start, ids.shape[1], cache)
        if cache is not None:
            cache.advance(ids.shape[1])
            x = x[:, -1:]
        logits = self.lm_head(self.norm(x))
        if targets is None:
            return logits, None
        loss = self.loss(logits, targets)
        if self.config.experts and self.training:
            loss = loss + self.config.load_balancing * torch.stack(balances).mean()
        return logits, loss

    def embed(self, ids: Tensor, start: int = 0) -> Tensor:
        """Token ids [B, T] from position `start` on to what the first block reads, [B, T, width]."""
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(start, start + ids.shape[1], device=ids.device))
        return x

    def run_blocks(
        self, x: Tensor, start: int, tokens: int, cache: KVCache | None = None, names: Sequence[str] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The blocks one after the other: x [B, T, width] -> (x, load-balancing losses of those that have experts).

        start, tokens: the positions of the sequence. names: of the children of `blocks` to run; None: all.
        """
        rope = None if self.rope is None else self.rope(start, tokens, x.device)
        balances: list[Tensor] = []
        for block in self.blocks if names is None else (self.blocks.get_submodule(name) for name in names):
            if self.activation_checkpointing and self.training and torch.is_grad_enabled():
                x, balance = checkpoint(block, x, rope, use_reentrant=False)  # type: ignore[misc]
            else:
                x, balance = block(x, rope, cache)
            balances += [] if balance is None else [balance]
        return x, balances

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, 0-dim float32 nats: logits [B, T, vocab_size], targets [B, T] with -100 for nothing."""
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def _check_input(self, ids: Tensor, start: int) -> None:
        if ids.dim() != 2:
            raise DataError(f"ids have shape {tuple(ids.shape)}: expected [batch, tokens]; add the missing dimension")
        end = start + ids.shape[1]
        if end > self.config.context:
            raise DataError(
                f"the sequence has {end} tokens, the model's context is {self.config.context}: shorten the sequence, "
                f"or build the model with context={end}"
            )
        if self.embedding.weight.is_meta and not ids.is_meta:
            raise NarrowgaugeError(
                "the model's parameters are on the meta device, without memory: call model.to_empty(device=...) and "
                "then model.reset_parameters() or model.load_state_dict(...)"
            )

    generate = generate


def _table(rows: int, width: int) -> nn.Embedding:
    # nn.Embedding's own initialization loads torch's compiler on the meta device: seconds
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


def _normal_(module: nn.Module, std: float, generator: torch.Generator | None) -> None:
    weight: Tensor = module.weight  # type: ignore[assignment]
    device = weight.device if generator is None else generator.device
    values = torch.empty(weight.shape, dtype=torch.float32, device=device).normal_(0.0, std, generator=generator)
    parted = getattr(module, "parted", None)
    if parted is None:
        weight.copy_(values)
    else:
        parted.load(module, "weight", values)


def _reset_extra_state(module: nn.Module) -> None:
    """Let layers that replaced torch's own reset what they hold besides weights, e.g. scales, and the rotary tables.

    Their random numbers are thrown away: the weights drawn afterwards are those of a model never converted.
    """
    if hasattr(module, "reset_delayed"):  # a linear layer: its weight may be a table that was drawn before
        module.reset_delayed()  # type: ignore[operator]
        return
    reset = getattr(type(module), "reset_parameters", None)
    plain = type(module).__module__.startswith("torch.nn") or type(module) is GroupedLinear
    if reset is None or isinstance(module, GPT) or plain:
        return
    devices = {p.device for p in module.parameters(recurse=False) if p.device.type == "cuda"}
    with torch.random.fork_rng(devices):
        reset(module)

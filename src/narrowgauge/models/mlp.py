"""Feed-forward networks: one per block, or a mixture of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.models.config import Activation, GPTConfig
from narrowgauge.ops.experts import GroupedLinear

MakeLinear = Callable[..., nn.Module]  # (in_features, out_features, bias=...)


class SwiGLU(nn.Module):
    """y = down(silu(gate) * up), with gate and up from one fused projection: rows of gate, then rows of up.

    With config.swiglu_limit L, gate is clamped to at most L and up to [-L, L], so that what `down` reads stays within
    L^2 (the clamp of gpt-oss, arXiv:2508.10925, whose slope of 1.702 and `up + 1` are not taken over). Where `linear`
    makes a GroupedLinear of many experts, `counts` says which rows are whose.
    """

    def __init__(self, config: GPTConfig, linear: MakeLinear = nn.Linear) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.gate_up = linear(config.width, 2 * config.hidden_width, bias=config.mlp_bias)
        self.down = linear(config.hidden_width, config.width, bias=config.mlp_bias)

    def forward(self, x: Tensor, *counts: Tensor) -> Tensor:
        """x [..., width] -> [..., width]."""
        gate, up = self.gate_up(x, *counts).chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down(F.silu(gate) * up, *counts)


class GELUMLP(nn.Module):
    """y = down(gelu(up)). Where `linear` makes a GroupedLinear of experts, `counts` says which rows are whose."""

    def __init__(self, config: GPTConfig, linear: MakeLinear = nn.Linear) -> None:
        super().__init__()
        self.up = linear(config.width, config.hidden_width, bias=config.mlp_bias)
        self.down = linear(config.hidden_width, config.width, bias=config.mlp_bias)

    def forward(self, x: Tensor, *counts: Tensor) -> Tensor:
        """x [..., width] -> [..., width]."""
        return self.down(F.gelu(self.up(x, *counts)), *counts)


def make_mlp(config: GPTConfig, linear: MakeLinear = nn.Linear) -> SwiGLU | GELUMLP:
    """A feed-forward network with the config's activation, of layers that `linear` makes."""
    return SwiGLU(config, linear) if config.activation is Activation.SWIGLU else GELUMLP(config, linear)


class Router(nn.Module):
    """Logits of the experts, always in float32: small differences decide which expert a token visits.

    No nn.Linear, so that nothing that converts linear layers narrows it.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))

    def forward(self, x: Tensor) -> Tensor:
        """x [N, width] of any float dtype -> float32 [N, experts]."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())


class MixtureOfExperts(nn.Module):
    """y = sum over the k most probable experts of weight_e * expert_e(x), and a load-balancing loss.

    The probabilities are a softmax over all experts; for k > 1 the chosen ones are rescaled to sum to 1 (Mixtral,
    arXiv:2401.04088), for k = 1 they are not, or the router would get no gradient (Switch, arXiv:2101.03961).
    All experts are one network of grouped layers.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.k = config.experts_per_token
        self.router = Router(config)
        self.experts = make_mlp(config, functools.partial(GroupedLinear, config.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, width] -> (y [B, T, width], load-balancing loss, 0-dim float32).

        An expert that no token chose gets gradients of zeros, and not none. The host waits for the device once, to
        learn how many tokens each expert has.
        """
        x_NW = x.reshape(-1, x.shape[-1])
        probability_NE = self.router(x_NW).softmax(dim=-1)
        weight_NK, expert_NK = probability_NE.topk(self.k, dim=-1)
        if self.k > 1:
            weight_NK = weight_NK / weight_NK.sum(dim=-1, keepdim=True)
        # assignments grouped by expert, tokens in order within one: a deterministic order of summation
        expert = expert_NK.flatten()
        order = expert.argsort(stable=True)
        counts = torch.zeros(probability_NE.shape[1], dtype=torch.int64, device=x.device)
        counts = counts.index_add(0, expert, torch.ones_like(expert))  # bincount would wait for the device
        token, weight = order // self.k, weight_NK.flatten()[order]
        visited = self.experts(x_NW[token], counts.cpu())
        y = torch.zeros(x_NW.shape, dtype=torch.float32, device=x.device)
        y = y.index_add(0, token, visited.float() * weight[:, None])
        return y.to(visited.dtype).view(x.shape), balance_loss(probability_NE, counts)


def balance_loss(probability_NE: Tensor, counts_E: Tensor) -> Tensor:
    """experts * sum_e (share of assignments to e) * (mean probability of e): 1 where the load is even.

    Source: Switch Transformer, arXiv:2101.03961, equation 4. Without tokens it is 0.
    """
    share = counts_E.float() / counts_E.sum().clamp(min=1)
    mean = probability_NE.sum(dim=0) / max(probability_NE.shape[0], 1)
    return probability_NE.shape[1] * (share * mean).sum()

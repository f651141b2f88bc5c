"""Feed-forward networks: one per block, or a mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.models.config import Activation, GPTConfig


class SwiGLU(nn.Module):
    """y = down(silu(gate) * up), with gate and up from one fused projection: rows of gate, then rows of up."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.hidden_width, bias=config.mlp_bias)
        self.down = nn.Linear(config.hidden_width, config.width, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., width]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class GELUMLP(nn.Module):
    """y = down(gelu(up))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.hidden_width, bias=config.mlp_bias)
        self.down = nn.Linear(config.hidden_width, config.width, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., width]."""
        return self.down(F.gelu(self.up(x)))


def make_mlp(config: GPTConfig) -> SwiGLU | GELUMLP:
    """One dense feed-forward network with the config's activation."""
    return SwiGLU(config) if config.activation is Activation.SWIGLU else GELUMLP(config)


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
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.k = config.experts_per_token
        self.router = Router(config)
        self.experts = nn.ModuleList(make_mlp(config) for _ in range(config.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, width] -> (y [B, T, width], load-balancing loss, 0-dim float32).

        Every expert runs, with no rows where no token chose it, so that its gradients are zeros and not missing.
        """
        x_NW = x.reshape(-1, x.shape[-1])
        probability_NE = self.router(x_NW).softmax(dim=-1)
        weight_NK, expert_NK = probability_NE.topk(self.k, dim=-1)
        if self.k > 1:
            weight_NK = weight_NK / weight_NK.sum(dim=-1, keepdim=True)
        # assignments grouped by expert, tokens in order within one: a deterministic order of summation
        order = expert_NK.flatten().argsort(stable=True)
        counts = expert_NK.flatten().bincount(minlength=len(self.experts))
        token, weight = order // self.k, weight_NK.flatten()[order]
        parts = x_NW[token].split(counts.tolist())
        visited = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
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

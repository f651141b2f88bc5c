"""A number for every token on top of a language model: value models, and reward models of one's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.errors import ConfigError
from narrowgauge.models.gpt import GPT
from narrowgauge.train.scoring import plain


class Scores:
    """What a ValueHead returns. logits: float32 [B, T, 1]."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class ScalarHead(nn.Module):
    """y = x @ weight + bias, one float32 number, computed in float32 also inside autocast: x [..., width] -> [..., 1].

    It is no nn.Linear, so that no recipe quantizes it: in bfloat16 values would have three digits.
    """

    def __init__(self, width: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        # 1 / sqrt(width + 1): as the reward head of Stiennon et al. 2020, arXiv:2009.01325
        self.weight = nn.Parameter(torch.empty(1, width).normal_(0.0, (width + 1) ** -0.5, generator=generator))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float(), self.bias.float())


class ValueHead(nn.Module):
    """A backbone and a scalar head: `.logits` float32 [B, T, 1] for (input_ids, attention_mask).

    backbone: this library's GPT, whose language-model head is taken off, or a transformers model, of which the part
    below its head is kept (`base_model`). It is taken over, not copied: give it a copy of a model that is still needed.
    width: of its last hidden state; None: as its config says. generator: of the head's weights.
    """

    def __init__(
        self, backbone: nn.Module, width: int | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        backbone = plain(backbone)
        if isinstance(backbone, GPT):
            width = backbone.config.width
            backbone.config = backbone.config.replace(tied_embeddings=False)
            backbone.lm_head = nn.Identity()  # type: ignore[assignment]
        else:
            backbone = getattr(backbone, "base_model", backbone)
        self.config = getattr(backbone, "config", None)
        width = width if width is not None else getattr(self.config, "hidden_size", None)
        if width is None:
            raise ConfigError(
                f"{type(backbone).__name__} does not say how wide its hidden states are: expected config.hidden_size; "
                "pass width="
            )
        self.backbone = backbone
        self.head = ScalarHead(width, generator).to(next(backbone.parameters()).device)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Scores:
        """ids int64 [B, T], mask [B, T], 1 on tokens."""
        if isinstance(self.backbone, GPT):
            return Scores(self.head(self.backbone(input_ids)[0]))
        found = self.backbone(input_ids=input_ids, attention_mask=attention_mask)
        hidden = found if isinstance(found, Tensor) else found.last_hidden_state
        return Scores(self.head(hidden))

"""What surrounds an optimizer's step: the guard against non-finite gradients, loss scaling, clipping."""

from narrowgauge.optim.clip import clip_grad_norm_
from narrowgauge.optim.guard import StepGuard
from narrowgauge.optim.scaler import LossScaler

__all__ = ["LossScaler", "StepGuard", "clip_grad_norm_"]

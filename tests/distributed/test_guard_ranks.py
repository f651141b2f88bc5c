"""The guard on several processes: the worst of all ranks decides, and all of them decide alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run

import narrowgauge as ng
from narrowgauge.observe.journal import Journal
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.train import loop
from narrowgauge.train.assemble import assemble
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.session import Session

pytestmark = pytest.mark.multiproc

LAYER = "blocks.1.mlp.down"
GUARD = {"mode": "act", "every": 2}


def _train(values: dict[str, Any], fault: str) -> tuple[list[Any], dict[str, str], Any, float]:
    """Decisions, casts of inputs, the guard's state and the last loss, as this rank has them."""
    sessions: list[Session] = []
    real_assemble, real_session = loop.assemble, loop.Session

    def faulty(*args: Any) -> Any:
        parts = assemble(*args)
        if fault == "flushed v":
            assert isinstance(parts.optimizer, LowPrecisionOptimizer)
            parts.optimizer.override(f"{LAYER}.weight", exp_avg_sq=ng.CastSpec(ng.formats.UINT4), keep_nonzero=False)
        elif fault == "NaN":
            reads = [0]

            def spoil(module: torch.nn.Module, _: Any, out: torch.Tensor) -> torch.Tensor | None:
                reads[0] += module.training
                return out * float("nan") if module.training and dist.get_rank() == 1 and 8 < reads[0] <= 14 else None

            parts.model.embedding.register_forward_hook(spoil)
        elif dist.get_rank() == 1 and LAYER in dict(parts.model.named_modules()):  # one rank's values alone
            layer, calls = parts.model.get_submodule(LAYER), [0]

            def scaled(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
                calls[0] += 1  # once the scale is there, which is not renewed in this run
                return (inputs[0] * (2.0**20 if calls[0] > 4 else 1.0),)

            layer.register_forward_pre_hook(scaled)
            layer.register_forward_hook(lambda _, inputs, out: out / (2.0**20 if calls[0] > 4 else 1.0))
        return parts

    class Kept(Session):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            sessions.append(self)
            self.told: list[Any] = []
            tell = self.guard._tell

            def both(decision: Any) -> None:
                self.told.append(decision)
                tell(decision)

            self.guard._tell = both  # type: ignore[method-assign]

    loop.assemble, loop.Session = faulty, Kept
    try:
        result = loop.run(TrainConfig.from_dict(values))
    finally:
        loop.assemble, loop.Session = real_assemble, real_session
    (session,) = sessions
    casts = {
        name: repr(m.training_casts.input)
        for name, m in session.parts.model.named_modules()
        if getattr(m, "quantized", False)
    }
    return session.told, casts, session.guard.state(), result.last_loss  # type: ignore[attr-defined]


CASES = {
    "one rank's outliers": ("unscaled", "fp8_current", {"data": 2}),
    "another stage's layer": ("unscaled", "fp8_current", {"pipeline": 2}),
    "moments of another rank": ("flushed v", "narrow8", {"data": 2, "partition": True}),
    "sharded moments": ("flushed v", "narrow8", {"shard": 2}),
    "NaN on one rank": ("NaN", "fp8_current", {"data": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_decide_alike(case: str, make_values: Any) -> None:
    fault, recipe, parallel = CASES[case]
    fields: dict[str, Any] = {}
    if fault == "unscaled":  # a scale that does not follow, so that one rank's values can exceed it
        fields = {"recipe": "fp8_delayed", "recipe_fields": {"interval": 1000}}
    values = make_values("several", parallel, **{"recipe": recipe, "guard": GUARD, "steps": 8, **fields})
    (mine, casts, state, loss), (others, other_casts, other_state, other_loss) = run(
        2, _train, values, fault, timeout_s=300
    )
    assert mine and mine == others and state == other_state and loss == other_loss
    assert any(decision.action == "promote" for decision in mine)
    folder = RunFolder(TrainConfig.from_dict(values).path)
    assert [row["message"] for row in Journal(folder.path).of_kind("guard")] == [
        *(decision.message for decision in mine)
    ]
    if fault == "NaN":
        assert [decision.action for decision in mine][-1] == "rollback"
        assert not casts and not other_casts  # all in the compute dtype
    elif fault == "unscaled":
        promoted = {d.layer for d in mine if d.action == "promote" and d.role == "input"}
        assert LAYER in promoted
        for known in (casts, other_casts):
            assert all("Delayed" not in known[name] for name in promoted if name in known)
    else:
        assert {(d.layer, d.role) for d in mine} == {(LAYER, "exp_avg_sq")}

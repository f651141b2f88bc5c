"""What the guard decided, with its numbers and in plain words: a row of the journal, and an event."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from narrowgauge.recipes.spec import Recipe
from narrowgauge.train.guard_ladder import FLUSHED, SATURATED, SQNR_DB, Rung, words
from narrowgauge.train.guard_limits import Finding
from narrowgauge.train.guard_losses import NONFINITE, Trouble


@dataclass(frozen=True)
class Decision:
    """One decision. action: warn, promote, demote, rollback or wait. layer, role: None: of the whole model.

    measure, value, threshold: what it was taken by. before, after: casts, recipes or steps, in words.
    """

    step: int
    action: str
    layer: str | None
    role: str | None
    measure: str
    value: float
    threshold: float
    before: str
    after: str
    message: str

    def row(self) -> dict[str, Any]:
        """The fields of a journal's row beside its kind and step."""
        fields = dataclasses.asdict(self)
        del fields["step"]
        return fields


def of_cast(
    step: int, action: str, key: tuple[str, str], finding: Finding, before: Rung, after: Rung, calm: int = 0
) -> Decision:
    """A decision about one role of one layer."""
    layer, role = key
    where = f"{layer or 'the model'}, {role}"
    found = _finding(role, finding)
    old, new = words(before), words(after)
    message = {
        "wait": f"{where}: {found}; the next step is looked at, too",
        "warn": f"{where}: {found}; {old} stays" + ("" if old == new else f", where {new} would be the next wider"),
        "promote": f"{where}: {found}: from {old} to {new}",
        "demote": f"{where}: long calm, {new} is tried again; after a failure that takes {2 * calm} samples",
    }[action]
    return Decision(step, action, layer, role, finding.measure, finding.value, finding.limit, old, new, message)


def of_everything(step: int, action: str, recipe: Recipe, trouble: Trouble | None = None) -> Decision:
    """All layers to the compute dtype, or back to the recipe."""
    compute, narrow = f"all products in {recipe.compute_format}", f"recipe {recipe.name}"
    if trouble is None:
        message = f"losses have long been calm: {narrow} is tried again for all layers"
        return Decision(step, action, None, None, "calm", 0.0, 0.0, compute, narrow, message)
    message = f"{_trouble(trouble)}: {compute}, until losses are calm"
    measure, value, limit = trouble.measure, float(trouble.value), float(trouble.limit)
    return Decision(step, action, None, None, measure, value, limit, narrow, compute, message)


def of_loss(trouble: Trouble, action: str, *, restored: int | None = None, why: str = "") -> Decision:
    """A warning about losses, and why it is no more than that; or a way back to the state of the step `restored`."""
    if action == "rollback":
        after = f"step {restored}"
        message = f"{_trouble(trouble)}: back to the state after step {restored}, and on with the data that follows"
    else:
        after = f"step {trouble.step}"
        message = f"{_trouble(trouble)}; {why}"
    measure, value, limit = trouble.measure, float(trouble.value), float(trouble.limit)
    before = f"step {trouble.step}"
    return Decision(trouble.step, action, None, None, measure, value, limit, before, after, message)


def _trouble(trouble: Trouble) -> str:
    if trouble.measure == NONFINITE:
        return f"{trouble.value:.0f} steps in a row, since step {trouble.since}, had no finite loss or gradient"
    return (
        f"the loss {trouble.value:.4g} is above its band, which ends at {trouble.limit:.4g}, since step {trouble.since}"
    )


def _finding(role: str, finding: Finding) -> str:
    value, limit = finding.value, finding.limit
    if finding.measure == SATURATED:
        share, most = _apart(value, limit, 2, "%")
        return f"{share} of the values are cut off at the largest of the format (limit {most})"
    if finding.measure == FLUSHED:
        share, most = _apart(value, limit, 2, "%")
        if role == "exp_avg_sq":
            return f"{share} of the second moments whose first is not zero are zero (limit {most})"
        return f"{share} of the non-zero values become zero (limit {most})"
    if finding.measure == SQNR_DB:
        sqnr, least = _apart(value, limit, 1, "f")
        return f"the cast's error is {sqnr} dB below the values (limit {least} dB)"
    return "calm"


def _apart(value: float, limit: float, digits: int, kind: str) -> tuple[str, str]:
    """Both with so many decimals, and with more where they would else look the same."""
    for more in range(digits, 17):
        said = f"{value:.{more}{kind}}", f"{limit:.{more}{kind}}"
        if said[0] != said[1]:
            return said
    return f"{value:.{digits}{kind}}", f"{limit:.{digits}{kind}}"

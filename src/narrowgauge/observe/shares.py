"""From counts by layer and role to one figure a role."""

from __future__ import annotations

from collections.abc import Mapping

from narrowgauge.recipes.spec import OPERAND_ROLES

MEASURES = ("saturated", "flushed")


def shares_by_role(layers: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """{role: {"saturated": share, "flushed": share}}: means over the layers of {layer: {role: {measure: value}}}.

    Of the operands of products: the roles that every cast layer has.
    """
    by_role: dict[str, list[Mapping[str, float]]] = {}
    for roles in layers.values():
        for role in (role for role in OPERAND_ROLES if role in roles):
            measures = roles[role]
            by_role.setdefault(role, []).append(measures)
    return {
        role: {measure: sum(found[measure] for found in all_found) / len(all_found) for measure in MEASURES}
        for role, all_found in by_role.items()
    }


def worst_by_role(layers: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """{role: {measure: value}}: of the layers' values the lowest sqnr_db, and the largest of all other measures."""
    found: dict[str, dict[str, float]] = {}
    for roles in layers.values():
        for role, measures in roles.items():
            worst = found.setdefault(role, {})
            for measure, value in measures.items():
                worst[measure] = worse(measure, worst.get(measure, value), value)
    return found


def worse(measure: str, a: float, b: float) -> float:
    """Of two values of a measure the one that is in more trouble: the lower sqnr_db, the larger of all else."""
    return min(a, b) if measure == "sqnr_db" else max(a, b)

"""What precision does in PPO's updates, for the journal: to the policy, and to the value model under `value.`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

from narrowgauge.integrations.callback_journal import CallbackJournal, header_of
from narrowgauge.observe.journal_writer import JournalWriter
from narrowgauge.observe.ledger import Ledger
from narrowgauge.observe.observation import Observation, Precision
from narrowgauge.train.ppo import PPOTrainer

T = TypeVar("T")
VALUE = "value."  # before the names of the value model's layers


class PPOJournal:
    """Has a trainer's updates observed, and writes the rows; the steps' own are another's."""

    def __init__(self, trainer: PPOTrainer, writer: JournalWriter, every: int) -> None:
        """every: steps between samples; 0: none. The header is completed where no row follows it yet."""
        self._trainer, self._journal = trainer, CallbackJournal(writer, owns_steps=False)
        trainer.observations = tuple(
            Observation(trained.model, trained.optimizer, every) for trained in (trainer.policy, trainer.value)
        )
        self._bytes: dict[str, Any] | None = None
        self._found: dict[str, Any] | None = None
        # then all gradients are there: those of the policy are dropped right after, before the value model steps
        trainer.policy.optimizer.register_step_post_hook(lambda *_: self._count())
        writer.complete_header(_header(trainer))

    def stepped(self, step: int) -> None:
        """A step has been taken: write what was seen of it."""
        policy, value = (observation.read() for observation in self._trainer.observations)
        if policy is not None and value is not None:
            self._journal.sampled(step, _together(policy, value))
        if self._found != self._bytes:
            self._bytes = self._found
            self._journal.write("bytes", step, **(self._found or {}))

    def _count(self) -> None:
        # moments of the value model are there from the second update on
        if self._bytes is None or self._trainer.steps <= 1:
            self._found = _sum(self._trainer.ledgers())


def _header(trainer: PPOTrainer) -> dict[str, Any]:
    found = header_of(trainer.policy.model, trainer.policy.optimizer)
    of_value = header_of(trainer.value.model, trainer.value.optimizer)
    found["formats"] |= _of_value(of_value["formats"])
    found["conversion"] += [{**row, "name": VALUE + row["name"]} for row in of_value["conversion"]]
    return found


def _together(policy: Precision, value: Precision) -> Precision:
    layers = policy.layers | _of_value(value.layers)
    if policy.histograms is None or value.histograms is None:
        return Precision(layers, None)
    return Precision(layers, policy.histograms | _of_value(value.histograms))


def _of_value(layers: Mapping[str, T]) -> dict[str, T]:
    """By the names that the value model's layers have beside the policy's."""
    return {VALUE + name: roles for name, roles in layers.items()}


def _sum(ledgers: dict[str, Ledger]) -> dict[str, Any]:
    """The row of bytes of all models together."""
    roles: Counter[str] = Counter()
    for each in ledgers.values():
        roles.update(each.roles)
    return Ledger(dict(roles), sum(each.parameters for each in ledgers.values())).row()

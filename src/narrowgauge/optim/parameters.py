"""An optimizer's parameters: their places, names, and the formats that their state is to be kept in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.optim import checks
from narrowgauge.optim.formats import StateFormats
from narrowgauge.optim.overrides import applied, is_meant, overrides_of
from narrowgauge.recipes.spec import MOMENT_ROLES


class Place(NamedTuple):
    """Where a parameter stands. stream: its place among all parameters, and its random stream."""

    group: dict[str, Any]
    at: int
    index: int
    stream: int


class _Formats(NamedTuple):
    """Formats of a parameter's state, and what they followed from."""

    sources: tuple[Any, ...]
    formats: StateFormats


class FormattedOptimizer(Optimizer):
    """A torch.optim.Optimizer that knows in which formats the state of each of its parameters is kept."""

    moments: ClassVar[Mapping[str, str]]  # name in the state -> role

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        formats: StateFormats | None,
        overrides: Mapping[str, Mapping[str, Any]] | None,
        may_lose_updates: bool,
    ) -> None:
        self.formats = formats or StateFormats()
        self.names: dict[Tensor, str] = {}
        self._overrides: list[tuple[str | Tensor, dict[str, Any]]] = []
        self._forget_all()
        self._warns = False  # not before the overrides are known
        super().__init__(params, defaults)
        for glob, fields in (overrides or {}).items():
            self.override(glob, **fields)
        self._warns = not may_lose_updates
        self._warn_of_lost_updates(self.parameters())

    def _forget_all(self) -> None:
        """Drop what follows from the rest."""
        self._formats: dict[Tensor, _Formats] = {}
        self._places: dict[Tensor, Place] = {}

    def parameters(self) -> Iterator[Tensor]:
        """The parameters, in the order of the groups."""
        for group in self.param_groups:
            yield from group["params"]

    def place_of(self, p: Tensor) -> Place:
        """Where `p` stands. Raises NarrowgaugeError for a parameter of no group."""
        place = self._places.get(p)
        if place is None or not self._holds(place, p):
            self._places, stream = {}, 0
            for at, group in enumerate(self.param_groups):
                for index, each in enumerate(group["params"]):
                    self._places[each] = Place(group, at, index, stream)
                    stream += 1
            if p not in self._places:
                raise NarrowgaugeError(f"expected a parameter of this optimizer, found one of shape {list(p.shape)}")
        return self._places[p]

    def _holds(self, place: Place, p: Tensor) -> bool:
        groups, params = self.param_groups, place.group["params"]
        return (
            place.at < len(groups)
            and groups[place.at] is place.group
            and place.index < len(params)
            and params[place.index] is p
        )

    def name_of(self, p: Tensor) -> str:
        """The parameter's name, where known, else its place."""
        if p in self.names:
            return self.names[p]
        place = self.place_of(p)
        named = place.group.get("param_names")
        return named[place.index] if named else f"parameter {place.index} of group {place.at}"

    def override(self, which: str | Tensor, **fields: Any) -> None:
        """Keep the state of some parameters in other formats, before or after it was made.

        which: a parameter, or a glob over names, for which the optimizer was built from named parameters, or prepared.
        fields: those of `StateFormats`. Later overrides go over earlier ones. Raises NarrowgaugeError where no
        parameter is meant, or a moment that the optimizer has not; RecipeError for an unknown field or a format that
        cannot play the role.
        """
        changed = [p for p in self.parameters() if is_meant(p, self.name_of(p), which)]
        if not changed:
            what = f"'{which}' matches none of its names" if isinstance(which, str) else "that is none of them"
            raise NarrowgaugeError(
                f"override: expected a parameter of this optimizer, or a glob over their names, found {what}; build "
                "the optimizer from model.named_parameters(), or prepare it, so that it knows names"
            )
        for p in changed:  # checked before anything changes
            self._check_fields(p, fields)
            self.formats_of(p).replace(**fields)
        self._overrides.append((which, dict(fields)))
        self._formats = {}
        self._formats_changed(changed)

    def _formats_changed(self, params: Iterable[Tensor]) -> None:
        """Called when parameters have been given other formats."""

    def formats_of(self, p: Tensor) -> StateFormats:
        """The formats of one parameter's state."""
        own, known = overrides_of(p), self._formats.get(p)
        if known is not None:
            of_parameter, base, names = known.sources
            if of_parameter is own and base is self.formats and names is self.names:
                return known.formats
        formats = self.formats
        for fields in own:
            formats = applied(formats, fields)
        name = self.name_of(p) if self._overrides else ""
        for which, fields in self._overrides:
            if is_meant(p, name, which):
                formats = applied(formats, fields)
        self._formats[p] = _Formats((own, self.formats, self.names), formats)
        return formats

    def hand_over(self, old: Tensor, new: Tensor) -> None:
        """Let `new`, which is to replace `old` in the groups, have its name and overrides."""
        if old in self.names:
            self.names[new] = self.names.pop(old)
        self._overrides = [(new if which is old else which, fields) for which, fields in self._overrides]
        self._formats.pop(old, None)
        self._places = {}

    def moment_names(self, group: Mapping[str, Any]) -> Iterable[str]:
        """Names of the moments that parameters of a group have."""
        return self.moments

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises NarrowgaugeError for parameters, numbers and flags that no step can be taken with."""
        super().add_param_group(self._distinct(param_group))
        group = self.param_groups[-1]
        self._formats, self._places = {}, {}
        try:
            checks.check_floating(group["params"])
            self._check_group(group)
            for p in group["params"]:
                for fields in overrides_of(p):
                    self._check_fields(p, fields)
        except NarrowgaugeError:
            del self.param_groups[-1]
            raise
        self._warn_of_lost_updates(group["params"])

    def _distinct(self, group: dict[str, Any]) -> dict[str, Any]:
        if isinstance(group["params"], Tensor | set):  # torch takes the one, and refuses the other
            return group
        group["params"] = list(group["params"])
        named = [
            each if isinstance(each, tuple) else (f"parameter {at}", each) for at, each in enumerate(group["params"])
        ]
        names = {p: name for name, p in named if isinstance(p, Tensor)}
        checks.check_distinct((p for _, p in named if isinstance(p, Tensor)), self.parameters(), names.__getitem__)
        return group

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """What a subclass refuses about a group."""
        checks.check_group(group, type(self).__name__)

    def _check_fields(self, p: Tensor, fields: Iterable[str]) -> None:
        has = {self.moments[name] for name in self.moment_names(self.place_of(p).group)}
        for field in fields:
            if field in MOMENT_ROLES and field not in has:
                raise NarrowgaugeError(
                    f"override: '{self.name_of(p)}' has no {field} under {type(self).__name__}, which keeps "
                    f"{', '.join(sorted(has)) or 'no moment'}: leave {field} out"
                )

    def _warn_of_lost_updates(self, params: Iterable[Tensor]) -> None:
        if self._warns:
            checks.warn_of_lost_updates(params, self.formats_of, self.name_of)

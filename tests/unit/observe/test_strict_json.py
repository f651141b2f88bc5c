"""JSON that every reader takes: numbers that it has no digits for are texts, and all others keep their bits."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest

from narrowgauge.observe import strict_json

VALUE: dict[Any, Any] = {
    "loss": [1.5, math.inf, -math.inf, math.nan],
    "pair": (math.inf, ("NaN's", [-math.inf])),
    2: {"deep": {"-Infinity": math.nan}},
    "Infinity": True,
    "none": None,
}
TEXT = (
    '{"loss": [1.5, "Infinity", "-Infinity", "NaN"], "pair": ["Infinity", ["NaN\'s", ["-Infinity"]]], '
    '"2": {"deep": {"-Infinity": "NaN"}}, "Infinity": true, "none": null}'
)


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def test_what_has_no_digits_is_text_wherever_it_is() -> None:
    text = strict_json.dumps(VALUE)
    assert text == TEXT
    json.loads(text, parse_constant=refuse)
    assert strict_json.dumps({("a", 1): math.inf, math.nan: 0}) == '{"(\'a\', 1)": "Infinity", "nan": 0}'
    assert strict_json.dumps({"b": 1, "a": math.nan}, sort_keys=True, indent=1) == '{\n "a": "NaN",\n "b": 1\n}'


def test_it_reads_back_as_numbers_and_keys_stay_words() -> None:
    found = strict_json.loads(TEXT)
    assert found["loss"][:3] == [1.5, math.inf, -math.inf] and math.isnan(found["loss"][3])
    assert found["pair"] == [math.inf, ["NaN's", [-math.inf]]]
    assert list(found) == ["loss", "pair", "2", "Infinity", "none"] and list(found["2"]["deep"]) == ["-Infinity"]
    assert math.isnan(found["2"]["deep"]["-Infinity"]) and found["Infinity"] is True and found["none"] is None


@pytest.mark.parametrize("value", [0.1, -0.0, 5e-324, 1.7976931348623157e308, 2.0**53 + 2, 1e22, 1 / 3])
def test_finite_numbers_keep_their_bits(value: float) -> None:
    (found,) = strict_json.loads(strict_json.dumps([value]))
    assert struct.pack("<d", found) == struct.pack("<d", value)


def test_what_is_no_json_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        strict_json.loads("{")

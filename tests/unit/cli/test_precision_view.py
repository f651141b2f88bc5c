"""The live view names the worst layers of the last sample, and says where bytes are."""

from __future__ import annotations

import io
import math

from rich.console import Console
from test_progress import a_step, rendered, the_start

from narrowgauge.cli.precision_view import bytes_by_role, view, worst

LAYERS = {
    "blocks.0.mlp.down": {
        "input": {"sqnr_db": 31.5, "saturated": 0.25, "flushed": 0.0, "amax": 3.0},
        "grad_output": {"sqnr_db": 12.25, "saturated": 0.0005, "flushed": 0.0125},
    },
    "blocks.1.mlp.down": {"weight": {"sqnr_db": math.inf}, "input": {"sqnr_db": 29.0}, "param": {"lost": 0.75}},
    "[head]": {"input": {"sqnr_db": 30.0}, "param": {"lost": 0.25}},
}
ROLES = {"param": 12_345_678, "grad": 6_000, "exp_avg": 17}


def test_the_worst_come_first_and_small_shares_and_exact_casts_not_at_all() -> None:
    assert worst(LAYERS) == [
        ("lowest SQNR", "blocks.0.mlp.down", "grad_output", "12.2 dB"),
        ("", "blocks.1.mlp.down", "input", "29.0 dB"),
        ("", "[head]", "input", "30.0 dB"),
        ("most saturated", "blocks.0.mlp.down", "input", "25.00%"),
        ("most flushed", "blocks.0.mlp.down", "grad_output", "1.25%"),
        ("most updates lost", "blocks.1.mlp.down", "param", "75.00%"),
    ]
    assert worst({}) == []


def test_bytes_are_in_units_that_can_be_read() -> None:
    assert bytes_by_role(ROLES) == "bytes  total 12.4 MB  param 12.3 MB  grad 6.0 kB  exp_avg 17 B"


def test_a_narrow_terminal_gets_one_line_a_row() -> None:
    file = io.StringIO()
    Console(file=file, width=40).print(view(50, LAYERS, ROLES))
    lines = file.getvalue().splitlines()
    assert len(lines) == 2 + len(worst(LAYERS)) and max(map(len, lines)) <= 40


def test_a_terminal_shows_the_sample_below_the_line_and_plain_output_stays_terse() -> None:
    emitted = (the_start(), a_step(10, precision=LAYERS, bytes_by_role=ROLES))
    live = rendered(*emitted, terminal=True)
    for fact in ("worst layers at step 10", "blocks.0.mlp.down", "[head]", "12.2 dB", "param 12.3 MB"):
        assert fact in live
    plain = rendered(*emitted)
    assert "worst layers" not in plain and len(plain.splitlines()) == len(
        rendered(the_start(), a_step(10)).splitlines()
    )

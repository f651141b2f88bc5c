"""The page of peers' options says what the code does."""

from __future__ import annotations

import re

import peer_tables

import narrowgauge as ng


def test_the_tables_are_those_of_the_code() -> None:
    text = peer_tables.PAGE.read_text(encoding="utf-8")
    assert text == peer_tables.page(text), "write them anew: python tests/unit/recipes/peer_tables.py"


def test_the_recipes_of_the_table_of_names_are_those_that_come_out() -> None:
    rows = re.findall(r"^\| `([a-z0-9_]+)` \| `(ng\.recipe\(.*\))` \|$", peer_tables.names(), re.MULTILINE)
    assert len(rows) == 7
    for theirs, ours in rows:
        assert ng.recipes.from_torchao(theirs) == eval(ours, {"ng": ng})

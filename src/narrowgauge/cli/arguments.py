"""Argument parsing that raises instead of exiting, takes no abbreviations, and names the closest option."""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from narrowgauge.errors import ConfigError, closest


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Text as written where its lines fit the terminal; else with its paragraphs filled anew.

    A paragraph is lines in a row without an indent; examples and lists, which have one, stay as written.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if all(len(line) <= width for line in text.splitlines()):
            return super()._fill_text(text, width, indent)
        filled = []
        for is_prose, group in itertools.groupby(text.splitlines(), key=lambda line: line[:1].strip() != ""):
            lines = list(group)
            filled += textwrap.wrap(" ".join(lines), width, break_on_hyphens=False) if is_prose else lines
        return super()._fill_text("\n".join(filled), width, indent)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` for one command: help shows `examples` as written."""

    def __init__(self, command: str, description: str, examples: Sequence[str]) -> None:
        super().__init__(
            prog=f"narrowgauge {command}",
            description=description,
            epilog="examples:\n" + "\n".join(f"  {line}" for line in examples),
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError where argparse would print and exit."""
        if message.endswith("expected one argument"):  # argparse takes a value that begins with a dash for an option
            message += "; one that begins with a dash goes behind an equals sign: --OPTION=-VALUE"
        raise ConfigError(f"{message} (see `{self.prog} --help`)")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of `argv`; ConfigError with the closest option where one is unknown."""
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            self.refuse(unknown)
        return arguments

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Raise ConfigError for words that are none of the command's, with the closest option."""
        option = next((word for word in unknown if word.startswith("-")), None)
        if option is None:
            self.error(f"unexpected argument '{unknown[0]}'")
        self.error(f"unknown option '{option}'{closest(option.split('=')[0], self._option_string_actions)}")

    def add_json_option(self) -> None:
        """Add `--json`, which every command that prints a table has."""
        self.add_argument("--json", action="store_true", help="print JSON instead of a table")

"""Argument parsing that raises instead of exiting, takes no abbreviations, and names the closest option."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from narrowgauge.errors import ConfigError, closest


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` for one command: help shows `examples` as written."""

    def __init__(self, command: str, description: str, examples: Sequence[str]) -> None:
        super().__init__(
            prog=f"narrowgauge {command}",
            description=description,
            epilog="examples:\n" + "\n".join(f"  {line}" for line in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
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

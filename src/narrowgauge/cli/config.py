"""`train`'s YAML files and command line, read by jsonargparse in the order given: later ones win.

A key is a path into the dataclasses of `train.config`: `--optimizer.lr 1e-3`.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jsonargparse
import yaml

from narrowgauge.cli.arguments import HelpFormatter
from narrowgauge.errors import ConfigError, closest
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.parse import read_yaml
from narrowgauge.train.sections import SwitchConfig

_DESCRIPTION = """
Train a language model. Without options: a small GPT in FP8 on text that every Python carries, in a few minutes on two
CPU cores. Files and keys are read in the order given, later ones win; values are YAML; keys are never abbreviated. A
mapping for a section changes the keys that it names, one for recipe_fields replaces all: --recipe_fields.KEY adds one.
"""
_EXAMPLES = """
examples:
  narrowgauge train
  narrowgauge train --recipe bf16 --steps 200 --optimizer.lr 1e-3
  narrowgauge train --recipe fp8_current --recipe_fields "{tf32: true}" --data.corpus "texts/*.txt"
  narrowgauge train --config runs/NAME/config.yaml --name again --seed 1

After an error, --debug shows the traceback too.
"""


NO_KEYS = ("json", "live", "live_port")  # of the command line alone


class Arguments(NamedTuple):
    """What `narrowgauge train` was asked for.

    as_json: the closing tables as JSON. live_port: where the report is served, 0 for any free port; None: nowhere.
    """

    config: TrainConfig
    as_json: bool
    live_port: int | None = None


class _ConfigFile(jsonargparse.ActionConfigFile):
    """Names the file in what is wrong with it, and refuses a value where a section belongs."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        try:
            super().__call__(parser, cfg, values, option_string)
        except (argparse.ArgumentError, TypeError, ValueError) as error:
            raise ConfigError(f"{values}: {_explain(error, ()).removeprefix('config: ')}") from error
        for section in sorted({key.partition(".")[0] for key in parser.get_defaults().keys() if "." in key}):
            if not isinstance(cfg[section], jsonargparse.Namespace):  # a later --SECTION.KEY would drop it silently
                raise ConfigError(
                    f"{values}: {section}: expected keys and values, found {cfg[section]!r}: "
                    f"give {section}.KEY, or leave it out"
                )


class _HelpFormatter(jsonargparse.DefaultHelpFormatter, HelpFormatter):
    """Types and defaults after each description; examples as written."""


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Read the command line and the files it names into a checked configuration.

    Raises ConfigError, which names what is wrong; SystemExit after printing the help text.
    """
    parser = _parser()
    defaults = dict(parser.get_defaults().items())
    try:
        values = parser.parse_args(_words(argv, defaults)).as_dict()
    except (argparse.ArgumentError, UnicodeDecodeError) as error:
        raise ConfigError(_explain(error, defaults)) from error
    del values["config"]
    as_json, live, live_port = (values.pop(name) for name in NO_KEYS)
    if live_port is not None and not live:
        raise ConfigError("live_port: expected it with --live, found it alone: add --live, or leave it out")
    for section in values.values():
        if isinstance(section, dict):
            section.pop("__path__", None)  # the file that a section came from: `--model FILE`
    config = TrainConfig.from_dict(values)  # refuses what jsonargparse lets pass, such as null for a number
    config.check()
    return Arguments(config, as_json, (live_port or 0) if live else None)


def _parser() -> jsonargparse.ArgumentParser:
    jsonargparse.set_loader("narrowgauge", _read, exceptions=(ValueError,))
    parser = jsonargparse.ArgumentParser(
        prog="narrowgauge train",
        usage="narrowgauge train [--config FILE] [--KEY VALUE ...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=_HelpFormatter,
        parser_mode="narrowgauge",
        exit_on_error=False,
        allow_abbrev=False,
        print_config=None,
    )
    parser.add_argument(
        "--config",
        action=_ConfigFile,
        metavar="FILE",
        help="A YAML file of the keys below, nested at the dots; may be given several times.",
    )
    parser.add_argument(
        "--json", action="store_true", help="Print the closing tables as JSON; progress goes to standard error."
    )
    parser.add_argument(
        "--live", action="store_true", help="Serve the run's report on this machine alone while it trains."
    )
    parser.add_argument("--live_port", type=int, help="The port of --live (default: any that is free).")
    parser.add_class_arguments(TrainConfig)
    return parser


def _read(text: str) -> Any:
    value = read_yaml(text)
    if value is None and yaml.compose(text, yaml.SafeLoader) is None:
        return {}  # a file that is empty, or all comments, changes nothing
    return value


def _words(argv: Sequence[str], defaults: dict[str, Any]) -> list[str]:
    """`argv` as `--KEY=VALUE`: so a value may begin with a dash, a flag needs none, and `--batch-size` is a key too."""
    words, joined = list(argv), []
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if not equals and words and not words[0].startswith("--"):
                equals, value = "=", words.pop(0)
            elif not equals and name not in NO_KEYS and isinstance(defaults.get(name), bool):
                equals, value = "=", "true"
            word = f"--{name}{equals}{value}"
        joined.append(word)
    return joined


def _explain(error: Exception, keys: Iterable[str]) -> str:
    """What jsonargparse found wrong, in one line: expected, found, remedy; for an unknown key the nearest of `keys`."""
    message = " ".join(str(error).split())
    if isinstance(error, UnicodeDecodeError):
        return f"expected YAML in UTF-8, found: {message}: convert the file"
    if unrecognized := re.match(r"unrecognized arguments: (\S+)", message, re.IGNORECASE):
        option = unrecognized[1]
        if not option.startswith("--"):
            return f"expected --KEY VALUE, found '{option}' (see `narrowgauge train --help`)"
        return _unknown(option[2:].partition("=")[0], keys)
    if about := re.match(r'Parser key "([\w.]+)":? ?(.*)', message):
        key, reason = about.groups()
        expected = " or ".join(dict.fromkeys(re.findall(r"Expected a <class '(\w+)'>", reason)))
        if expected:
            found = re.split(r"(?:Got|Given) value: ?", reason)[-1]
            return f"{key}={found}: expected {expected.replace('NoneType', 'null')}: change {key}"
        if key == "switches":
            return _explain_switches(reason)
        return f"{key}: expected keys and values or a file of them, found: {reason.partition(' - Parser key')[0]}"
    if re.search("not accept|not expected", message):  # Group 'model' does not accept option 'widht'
        return _unknown(".".join(re.findall(r"'([^']+)'", message)), keys)
    message = re.sub("^Problems parsing config:", "expected YAML, found:", message)
    message = re.sub("^Unexpected config:", "expected keys and values, found:", message)
    return f"{message} (see `narrowgauge train --help`)"


def _explain_switches(reason: str) -> str:
    keys = [f"switches.{field.name}" for field in dataclasses.fields(SwitchConfig)]
    if odd := re.search(r"Option '([\w.]+)' is not accepted", reason):
        return _unknown(f"switches.{odd[1]}", keys)
    if missing := re.search(r"arguments are required: (.*)", reason):
        return f"switches: expected {missing[1]} in every item, found none in one: add it"
    return f"switches: expected [{{after_step: STEP, recipe: NAME}}, ...], found: {reason}"


def _unknown(name: str, keys: Iterable[str]) -> str:
    valid = {part for key in keys for part in (key, key.partition(".")[0])}
    section = name.rpartition(".")[0]
    siblings = [key for key in valid if key.rpartition(".")[0] == section]
    return f"unknown configuration key '{name}'{closest(name, siblings or valid)}"

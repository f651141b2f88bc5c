"""Text without what is private in it: by what is allowed to stay, rather than by what is known to be secret."""

from __future__ import annotations

import functools
import getpass
import os
import re
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

import narrowgauge

MASK, PATH, ADDRESS, QUOTE = "…", "<path>", "<address>", "<text>"
_WORD = re.compile(r"[^\W\d_](?:[\w]*[^\W_])?")
_ADDRESSES = (
    re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"),
    re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,}[0-9a-fA-F]{0,4}(?![\w:])"),  # IPv6, and those of network cards
    re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)*"),
    re.compile(r"\b[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE),
)
_PATH = re.compile(r"[^\s'\"`=<>]*[/\\][^\s'\"`<>]*")
_RATES = {"tokens/s"}  # what has a slash and is no path
# a quotation begins where a word could, and runs to its end, or that of the text where it was cut
_QUOTATION = re.compile(r"(?<![\w'\"])(?P<mark>['\"])(?P<inner>.*?)(?:(?P=mark)(?!\w)|$)", re.DOTALL)


class Scrubber:
    """Masks what could be private: the names of the user and the machine, paths, addresses, quotations, and every word
    that the sources of this package do not have.

    names: texts that may stay, in quotation marks too, such as the names of modules.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = frozenset(names)
        self._parts = frozenset(part for name in names for part in name.split("."))
        self._secrets = [_pattern(secret) for secret in sorted(secrets(), key=len, reverse=True)]

    def message(self, text: str) -> str:
        """What is left of a text in words, such as a warning's."""
        text = _QUOTATION.sub(lambda found: found[0] if found["inner"] in self._names else QUOTE, text)
        return _WORD.sub(self._known, self.fact(text))

    def fact(self, text: str) -> str:
        """What is left of a text of a kind that is harmless, such as a version or the name of a CPU."""
        text = _PATH.sub(lambda found: found[0] if found[0] in _RATES else PATH, text)
        for pattern in _ADDRESSES:
            text = pattern.sub(ADDRESS, text)
        for pattern in self._secrets:
            text = pattern.sub(MASK, text)
        return text

    def values(self, found: Any) -> Any:
        """The same of every text, keys too, in mappings and lists; numbers stay."""
        if isinstance(found, dict):
            return {self.message(str(key)): self.values(value) for key, value in found.items()}
        if isinstance(found, list | tuple):
            return [self.values(value) for value in found]
        return self.message(found) if isinstance(found, str) else found

    def _known(self, found: re.Match[str]) -> str:
        return found[0] if found[0].casefold() in _vocabulary() or found[0] in self._parts else MASK


def secrets() -> set[str]:
    """Names of the user, of the machine, and of the folders that tell of them."""
    found = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "HOSTNAME", "COMPUTERNAME")}
    found |= {Path.home().name, Path.cwd().name} if _has_folders() else set()
    host = socket.gethostname()
    found |= {host, host.partition(".")[0], _user()}
    # by a common word nobody is found, and masking it would hide what the report is about
    return {name for name in found if name} - COMMON


COMMON = {"root", "user", "home", "localhost", "main", "narrowgauge"}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's number without a name
        return ""


def _has_folders() -> bool:
    try:
        return bool(Path.home() and Path.cwd())
    except (RuntimeError, OSError):
        return False


def _pattern(secret: str) -> re.Pattern[str]:
    """Anywhere in a text; short ones as whole words, or they would be found in all sorts of them."""
    quoted = re.escape(secret)
    return re.compile(quoted if len(secret) > 3 else rf"(?<!\w){quoted}(?!\w)", re.IGNORECASE)


@functools.cache
def _vocabulary() -> frozenset[str]:
    """All words of this package's sources."""
    folder = Path(narrowgauge.__file__).parent
    words: set[str] = set()
    for file in folder.rglob("*.py"):
        words |= {word.casefold() for word in _WORD.findall(file.read_text(encoding="utf-8"))}
    return frozenset(words)

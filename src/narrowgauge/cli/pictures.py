"""Pictures that commands write."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.errors import ConfigError


def write_picture(option: str, path: str, svg: str) -> None:
    """Write a picture to the file that `option` names, and say so. Raises ConfigError where it cannot be written."""
    if Path(path).suffix != ".svg":
        raise ConfigError(f"{option} {path}: expected a name that ends in .svg: change it")
    try:
        Path(path).write_text(svg, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: expected a file that can be written, found: {error.strerror}: choose another name"
        ) from error
    print(f"wrote {path}")

"""Pictures that commands write."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from narrowgauge.errors import ConfigError

SCREEN_FONTS = 'font-family: system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif'
# a renderer without a browser knows no generic names: those of usual systems
FILE_FONTS = (
    'font-family: "DejaVu Sans", "Liberation Sans", "Noto Sans", "Segoe UI", "Helvetica Neue", Arial, sans-serif'
)
PNG_ZOOM = 2.0  # pixels for one of the picture's units: sharp on a dense screen


def png(svg: str) -> bytes:
    """A picture of this library as PNG, in its light colours. Raises ConfigError without the renderer."""
    try:
        import resvg_py
    except ImportError:
        raise ConfigError(
            "a PNG: expected the package resvg-py, found none: pip install 'narrowgauge[report]', or take SVG"
        ) from None
    if sys.platform == "linux" and not any(_fonts()):
        raise ConfigError(
            "a PNG: expected a font on this machine, found none, so that its words would be missing: install one (on "
            "Debian: apt-get install fonts-dejavu-core), or take SVG"
        )
    svg = svg.replace(SCREEN_FONTS, FILE_FONTS)
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, background="#ffffff", zoom=PNG_ZOOM))


def _fonts() -> Iterator[Path]:
    folders = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "~/.local/share/fonts")
    for folder in folders:
        for kind in ("ttf", "otf", "ttc"):
            yield from Path(folder).expanduser().rglob(f"*.{kind}")


def write_picture(option: str, path: str, svg: str) -> None:
    """Write a picture to the file that `option` names, and say so. Raises ConfigError where it cannot be written."""
    if Path(path).suffix not in (".svg", ".png"):
        raise ConfigError(f"{option} {path}: expected a name that ends in .svg or .png: change it")
    data = png(svg) if Path(path).suffix == ".png" else svg.encode()
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: expected a file that can be written, found: {error.strerror}: choose another name"
        ) from error
    print(f"wrote {path}")

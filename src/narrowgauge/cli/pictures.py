"""Pictures that commands write."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.errors import ConfigError

PNG_ZOOM = 2.0  # pixels for one of the picture's units: sharp on a dense screen


def png(svg: str) -> bytes:
    """A picture of this library as PNG, in its light colours. Raises ConfigError without the renderer."""
    try:
        import resvg_py
    except ImportError:
        raise ConfigError(
            "a PNG: expected the package resvg-py, found none: pip install 'narrowgauge[report]', or take SVG"
        ) from None
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, background="#ffffff", zoom=PNG_ZOOM))


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

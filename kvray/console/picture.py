"""Pictures of commands: checked before anything is measured, and written at the end."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvray.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 120

PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png", help="Also draw the figures into this file."),
]


def check_plot(path: Path) -> None:
    """Refuse a `--plot` now that would fail at the end."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; run `pip install 'kvray[bench]'`.")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot writes a PNG, not {path.name}; give a name that ends in .png.")
    if not path.parent.is_dir():
        raise ConfigError(f"There is no directory {path.parent} for --plot; make it first.")


def write_picture(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)  # needs no screen
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH, format="png")
    except OSError as error:
        raise ConfigError(f"The plot {path} cannot be written ({error.strerror}).") from None

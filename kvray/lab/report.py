"""The report of whatever the lab ran: texts and tables, one JSON object, or a picture."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.table import Table

from kvray import __version__
from kvray.console.output import printer, write_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of one run of a command."""

    parts: Sequence[str | Table]
    facts: Mapping[str, Any]
    figure: Callable[[], Figure] | None = None
    """Returns the picture, where the command has one."""
    has_failed: bool = False
    """Whether a check of the run did."""

    def show(self, *, as_json: bool, plot: Path | None = None) -> None:
        """Print the parts, or JSON; write the picture, or raise ConfigError if it cannot be."""
        if as_json:
            print(json.dumps(self.facts, indent=2))
        else:
            console = printer()
            for part in self.parts:
                console.print(part)
        if plot is not None and self.figure is not None:
            write_picture(self.figure(), plot)


def machine_facts() -> dict[str, Any]:
    """Return what JSON says of the machine and of kvray."""
    return {"cpu_cores": psutil.cpu_count(), "machine": platform.machine(), "version": __version__}


def percent(ratio: float) -> str:
    """Return a ratio as people read it."""
    return f"{100 * ratio:.1f} %"

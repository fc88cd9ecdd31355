"""The options that several commands share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer


def option(metavar: str, text: str, *bounds: float, names: Sequence[str] = ()) -> Any:
    """Return an option for a value that help shows as `metavar`; a number has two bounds."""
    low, high = bounds or (None, None)
    return typer.Option(*names, metavar=metavar, help=text, min=low, max=high)


def flag(name: str, text: str) -> Any:
    """Return an option that is on or off."""
    return typer.Option(name, help=text)


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The configuration file. By default the one that KVRAY_CONFIG names, then"
        " /etc/kvray/kvray.yaml, then none.",
        show_default=False,
    ),
]

AddressOption = Annotated[
    str | None,
    option(
        "HOST:PORT",
        "A running Ray cluster. By default ray.address of the configuration, then RAY_ADDRESS, then"
        " the Ray of this machine.",
    ),
]

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object.", show_default=False)
]

VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show the traceback of an error.", show_default=False),
]

"""The options that several commands share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer


def option(
    metavar: str,
    text: str,
    *bounds: float,
    names: Sequence[str] = (),
    default: str | bool = True,
    values: Sequence[str] = (),
) -> Any:
    """Return an option for a value that help shows as `metavar`; a number has two bounds.

    `default` is for people, where the default is no value. The shell completes `values`.
    """
    low, high = bounds or (None, None)
    more: Any = {"autocompletion": lambda: list(values)} if values else {}
    more |= {"metavar": metavar, "help": text, "show_default": default}
    return typer.Option(*names, min=low, max=high, **more)


def flag(name: str, text: str) -> Any:
    """Return an option that is on or off."""
    return typer.Option(name, help=text)


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The configuration file.",
        show_default="KVRAY_CONFIG, then /etc/kvray/kvray.yaml, then none",
    ),
]

AddressOption = Annotated[
    str | None,
    option(
        "HOST:PORT",
        "A running Ray cluster.",
        default="ray.address, then RAY_ADDRESS, then a Ray of kvray's own",
    ),
]

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object.", show_default=False)
]

VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show the traceback of an error.", show_default=False),
]

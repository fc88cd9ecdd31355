"""The options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The configuration; else the file that KVRAY_CONFIG names, else the defaults.",
        show_default=False,
    ),
]

AddressOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address of a running Ray cluster; else ray.address of the configuration, else a"
        " local Ray.",
        show_default=False,
    ),
]

VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show tracebacks of errors.", show_default=False)
]

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
        help="The configuration file. By default the one that KVRAY_CONFIG names, then"
        " /etc/kvray/kvray.yaml, then none.",
        show_default=False,
    ),
]

AddressOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="A running Ray cluster. By default ray.address of the configuration, then the Ray of"
        " this machine.",
        show_default=False,
    ),
]

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object.", show_default=False)
]

VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show the traceback of an error.", show_default=False),
]

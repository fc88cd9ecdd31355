"""The options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from kvray.errors import ConfigError

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

PlanOption = Annotated[
    bool,
    typer.Option("--plan", help="Say what would be done, and do nothing.", show_default=False),
]

RecreateOption = Annotated[
    bool,
    typer.Option(
        "--recreate",
        help="Do it even if arenas are made anew for it: their blocks go, but for what an NVMe tier"
        " keeps.",
        show_default=False,
    ),
]

NodeLabelOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="For a node with this label of Ray's, as `nodes` in the configuration says; may be"
        " given several times.",
        show_default=False,
    ),
]

VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show tracebacks of errors.", show_default=False)
]


def parse_labels(given: list[str] | None) -> dict[str, str]:
    """Return the labels of `--node-label`, each key=value.

    Raises:
        ConfigError: one is not.
    """
    labels = {}
    for one in given or []:
        key, parted, value = one.partition("=")
        if not (key and parted and value):
            raise ConfigError(
                f"--node-label {one!r} is no label; write key=value, such as kvray.io/pool=big."
            )
        labels[key] = value
    return labels

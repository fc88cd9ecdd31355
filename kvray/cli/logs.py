"""`kvray logs`: what the parts of the tier say, on all nodes, in the order of its times."""

import json
import sys
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from kvray.actors.names import KINDS, PART_PREFIX
from kvray.cli.asking import open_client
from kvray.console.options import AddressOption, ConfigOption, VerboseOption
from kvray.console.output import boundary, printer

if TYPE_CHECKING:
    from kvray.actors.telemetry.log_files import LogEntry

_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}


def logs(
    part: Annotated[
        str | None,
        typer.Argument(
            metavar="PART",
            help="Only this part: shard, mover, lookup or supervisor, the name of one, or a node as"
            " `kvray status` has it.",
            autocompletion=lambda: list(KINDS),
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, max=100_000, help="Begin with the last N.")
    ] = 200,
    config: ConfigOption = None,
    address: AddressOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line.", show_default=False)
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Show what shards, movers, lookup and supervisor have logged, on all nodes, merged by time."""
    with boundary(verbose=verbose) as interrupts:
        console = printer()
        with open_client(config, address, interrupts) as client:
            try:
                for entries, remarks in client.logs(part, last=lines, follow=follow):
                    for remark in remarks:
                        print(f"kvray: {remark}", file=sys.stderr)
                    for entry in entries:
                        text = json.dumps(asdict(entry)) if as_json else line(entry)
                        style = None if as_json else _STYLES.get(entry.level)
                        console.print(text, style=style, soft_wrap=True)
                    console.file.flush()
            except KeyboardInterrupt:
                if not follow:
                    raise  # otherwise the usual end


def line(entry: "LogEntry") -> str:
    """Return an entry as people read it, its time as the clock here shows it."""
    moment = datetime.fromtimestamp(entry.time_s).isoformat(" ", "milliseconds")
    return f"{moment} {entry.level} {entry.part.removeprefix(PART_PREFIX)}: {entry.text}"

"""The command line: all commands, as the help page groups them."""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from kvray import __version__
from kvray.cli.arenas import sweep, verify
from kvray.cli.asking import bounded
from kvray.cli.bench import bench, chaos, demo
from kvray.cli.blocks import clear, drain, prefetch
from kvray.cli.config import config_app, connector_config
from kvray.cli.dashboard import dashboard
from kvray.cli.doctor.command import doctor
from kvray.cli.explain import explain
from kvray.cli.help import Command, Group
from kvray.cli.ls import ls
from kvray.cli.replay import replay
from kvray.cli.size import size
from kvray.cli.status import probe, status
from kvray.cli.up import down, up
from kvray.console.output import EXIT_ERROR, Output, OutputLost

_PANELS: dict[str, tuple[Callable[..., None] | typer.Typer, ...]] = {
    "Run a tier": (up, down, drain, clear, prefetch, sweep, connector_config, config_app),
    "Look at it": (status, ls, size, explain, doctor, probe, verify, dashboard),
    "Try and measure": (demo, chaos, replay, bench),
}
"""The commands, as the help page groups them."""

app = typer.Typer(
    name="kvray",
    cls=Group,
    help="A distributed KV-cache tier for TensorRT-LLM that lives inside a Ray cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        if isinstance(_command, typer.Typer):
            for _below in _command.registered_commands:
                assert _below.callback is not None
                _below.cls, _below.callback = Command, bounded(_below.callback)
            app.add_typer(_command, cls=Group, rich_help_panel=_panel)
        else:
            app.command(cls=Command, rich_help_panel=_panel)(bounded(_command))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvray {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line of this process."""
    if sys.stderr is None:  # closed: errors would go to stdout, or into the next file that opens
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.set_inheritable(2, True)  # which dup2 leaves out if it is that number already
        sys.stderr = os.fdopen(2, "w")
    output = Output(sys.stdout)
    with contextlib.redirect_stdout(output):
        try:
            try:
                app(prog_name="kvray")
            finally:
                output.flush()
        except OutputLost as error:  # of what prints outside of a command, or at its end
            print(f"kvray: {error}", file=sys.stderr)
            sys.exit(EXIT_ERROR)

"""The command line: one module for each command."""

from typing import Annotated

import typer

from kvray import __version__
from kvray.cli.bench import bench
from kvray.cli.chaos import chaos
from kvray.cli.clear import clear
from kvray.cli.config import config_app
from kvray.cli.connector_config import connector_config
from kvray.cli.dashboard import dashboard
from kvray.cli.demo import demo
from kvray.cli.doctor import doctor
from kvray.cli.down import down
from kvray.cli.examples import epilog
from kvray.cli.explain import EPILOG as EXPLAIN_EPILOG
from kvray.cli.explain import explain
from kvray.cli.ls import EPILOG as LS_EPILOG
from kvray.cli.ls import ls
from kvray.cli.prefetch import prefetch
from kvray.cli.probe import probe
from kvray.cli.replay import replay
from kvray.cli.status import status
from kvray.cli.sweep import sweep
from kvray.cli.top import EPILOG as TOP_EPILOG
from kvray.cli.top import top
from kvray.cli.up import up
from kvray.cli.upgrade import upgrade
from kvray.cli.verify import verify

app = typer.Typer(
    name="kvray",
    help="A distributed KV-cache tier for TensorRT-LLM that lives inside a Ray cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=epilog("up"))(up)
app.command(epilog=epilog("upgrade"))(upgrade)
app.command(epilog=epilog("status"))(status)
app.command(epilog=TOP_EPILOG)(top)
app.command(epilog=LS_EPILOG)(ls)
app.command(epilog=EXPLAIN_EPILOG)(explain)
app.command(epilog=epilog("doctor"))(doctor)
app.command(epilog=epilog("probe"))(probe)
app.command(epilog=epilog("prefetch"))(prefetch)
app.command(epilog=epilog("verify"))(verify)
app.command(epilog=epilog("clear"))(clear)
app.command(epilog=epilog("down"))(down)
app.command(epilog=epilog("sweep"))(sweep)
app.command(epilog=epilog("connector-config"))(connector_config)
app.command(epilog=epilog("replay"))(replay)
app.command(epilog=epilog("demo"))(demo)
app.command(epilog=epilog("chaos"))(chaos)
app.add_typer(bench)
app.add_typer(dashboard)
app.add_typer(config_app)


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
    app(prog_name="kvray")

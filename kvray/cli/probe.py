"""`kvray probe`: whether this node's shard serves, for the probes of containers."""

from typing import Annotated

import typer

from kvray.config import load_config
from kvray.console.options import ConfigOption, VerboseOption
from kvray.console.output import boundary
from kvray.errors import ShardUnavailable

EXIT_NOT_SERVING = 1


def probe(
    config: ConfigOption = None,
    timeout: Annotated[
        float, typer.Option(min=0.01, max=60, help="Longest wait for the answer, in seconds.")
    ] = 1.0,
    verbose: VerboseOption = False,
) -> None:
    """Ask this node's shard over its socket whether it serves.

    Needs no Ray. Run it as the user of the shard, with the configuration of this node. Engines
    need no such probe: they serve on without a shard.
    """
    with boundary(verbose=verbose):
        from kvray.node.stage_calls import ShardSocket

        shard = ShardSocket(load_config(config).node_dir)
        try:
            answer = shard.call("hello", timeout_s=timeout)
        except ShardUnavailable as error:
            typer.echo(f"kvray: {error}", err=True)
            raise typer.Exit(EXIT_NOT_SERVING) from None
        finally:
            shard.close()
        typer.echo(f"{answer['shard']} serves, epoch {answer['shard_epoch']}.")

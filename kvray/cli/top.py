"""`kvray top`: the nodes and replicas of a tier at work, refreshed until Ctrl-C."""

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from kvray.cli.asking import open_client
from kvray.cli.text.rates import History
from kvray.cli.text.top_view import view
from kvray.console.options import AddressOption, ConfigOption, VerboseOption
from kvray.console.output import boundary, printer
from kvray.errors import KVRayError

if TYPE_CHECKING:
    from kvray.client import Client

_WINDOW_S = 5.0
"""Rates are averages over this time: engines report once a second."""
_ANSWER_S = 5.0


def top(
    interval: Annotated[
        float, typer.Option("--interval", "-n", min=0.2, max=3600, help="Seconds between updates.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the rates of one interval, and end.")
    ] = False,
    config: ConfigOption = None,
    address: AddressOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Show memory, hits, misses and rates of all nodes and replicas, live.

    If the tier goes away, the view says so and waits for it.
    """
    with boundary(verbose=verbose) as interrupts:
        console = printer()
        with open_client(config, address, interrupts) as client:
            if once:
                _print_once(client, console, interval)
                return
            try:
                _watch(client, console, interval)
            except KeyboardInterrupt:
                return  # the usual end


def _print_once(client: "Client", console: Console, interval: float) -> None:
    history = History(_WINDOW_S)
    history.add(time.monotonic(), client.status(timeout_s=_ANSWER_S))
    time.sleep(interval)
    history.add(time.monotonic(), client.status(timeout_s=_ANSWER_S))
    console.print(view(history))


def _watch(client: "Client", console: Console, interval: float) -> None:
    history = History(max(_WINDOW_S, 2 * interval))
    # A file gets one frame after the other.
    screen = console.is_terminal
    with Live(view(history), console=console, screen=screen, auto_refresh=False) as live:
        while True:
            trouble = _look(client, history)
            frame = view(history, trouble)
            if screen:
                live.update(frame, refresh=True)
            else:
                console.print(frame)
            time.sleep(interval)


def _look(client: "Client", history: History) -> str:
    """Add the tier's status; return why there is none, or an empty text."""
    try:
        history.add(time.monotonic(), client.status(timeout_s=_ANSWER_S))
    except KVRayError as error:
        history.forget()
        return " ".join(str(error).split())
    return ""

"""Where a command meets its user: errors become one sentence and an exit status."""

import contextlib
import sys
from collections.abc import Iterator

import typer
from rich.console import Console

from kvray.cli.interrupts import Interrupts
from kvray.errors import KVRayError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


@contextlib.contextmanager
def stdout_kept() -> Iterator[None]:
    """Keep what Ray prints meanwhile, such as that a node has died, out of a command's answer."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def boundary(*, verbose: bool) -> Iterator[Interrupts]:
    """Run a command's body.

    Raises:
        typer.Exit: with `EXIT_ERROR` after an error of ours, whose message went to stderr (and
            its traceback with `verbose`); with `EXIT_INTERRUPTED` after Ctrl-C or SIGTERM.
    """
    interrupts = Interrupts()
    try:
        with interrupts.caught():
            yield interrupts
    except KVRayError as error:
        if verbose:
            Console(stderr=True).print_exception()
        else:
            print(f"kvray: {' '.join(str(error).split())}", file=sys.stderr)  # in one line
        raise typer.Exit(EXIT_ERROR) from None
    except KeyboardInterrupt:
        if verbose:
            Console(stderr=True).print_exception()
        else:
            print("kvray: interrupted.", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None

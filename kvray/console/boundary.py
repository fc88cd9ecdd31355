"""The outer edge of a command: errors become one sentence and an exit status."""

import contextlib
import os
import sys
from collections.abc import Iterator

import typer
from rich.console import Console

from kvray.console.interrupts import Interrupts
from kvray.console.tables import visible
from kvray.errors import ConfigError, KVRayError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


@contextlib.contextmanager
def stdout_kept() -> Iterator[None]:
    """Send to stderr what Ray prints meanwhile, such as the death of a node."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _require_directory() -> None:
    """Refuse to work without a working directory, where every relative path would fail."""
    try:
        os.getcwd()
    except OSError:
        raise ConfigError("The working directory was removed; change to one that exists.") from None


@contextlib.contextmanager
def boundary(*, verbose: bool) -> Iterator[Interrupts]:
    """Run a command's body.

    Raises:
        typer.Exit: with `EXIT_ERROR` after an error of ours. Its message went to stderr, or its
            traceback with `verbose`. With `EXIT_INTERRUPTED` after Ctrl-C or SIGTERM.
    """
    interrupts = Interrupts()
    try:
        with interrupts.caught():
            _require_directory()
            yield interrupts
    except KVRayError as error:
        if verbose:
            Console(stderr=True).print_exception()
        else:
            print(f"kvray: {visible(' '.join(str(error).split()))}", file=sys.stderr)  # in one line
        raise typer.Exit(EXIT_ERROR) from None
    except KeyboardInterrupt:
        if verbose:
            Console(stderr=True).print_exception()
        else:
            print("kvray: interrupted.", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None

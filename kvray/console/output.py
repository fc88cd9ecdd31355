"""What every command prints: tables, pictures and, at its edge, errors, also of writing itself."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvray.console.interrupts import Interrupts
from kvray.errors import ConfigError, KVRayError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EXIT_PIPE = 141
"""The status of a process that SIGPIPE ended, as other tools end here."""


class OutputLost(KVRayError):
    """The command's output cannot be written."""


class Output:
    """A stream that turns the OSError of the stream below into OutputLost."""

    def __init__(self, stream: TextIO | None) -> None:
        """Write to `stream`; None: the process has a closed standard output."""
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # on a terminal for ASCII alone

    def write(self, text: str) -> int:
        """Write `text`.

        OutputLost: the disk is full, for example. SystemExit: the reader has enough, as `head`
        does. That is no error.
        """
        if self._stream is None:
            raise OutputLost("stdout is closed; give the command one, or send it to /dev/null.")
        try:
            return self._stream.write(text)
        except OSError as error:
            raise self._lost(error) from None

    def flush(self) -> None:
        """Send on everything that was written; raises as `write` does."""
        try:
            if self._stream is not None:
                self._stream.flush()
        except OSError as error:
            raise self._lost(error) from None

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lost(self, error: OSError) -> OutputLost | SystemExit:
        """Return what to raise, and discard the buffer, which Python would flush at exit."""
        assert self._stream is not None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            return SystemExit(_EXIT_PIPE)
        return OutputLost(f"stdout cannot be written: {error.strerror}.")


_DOTS_PER_INCH = 120

PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png", help="Also draw the figures into this file."),
]


def check_plot(path: Path) -> None:
    """Refuse a `--plot` now that would fail at the end."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; run `pip install 'kvray[bench]'`.")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot writes a PNG, not {path.name}; give a name that ends in .png.")
    if not path.parent.is_dir():
        raise ConfigError(f"There is no directory {path.parent} for --plot; make it first.")


def blank_figure(
    width: float, height: float, *, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure in inches and its panels, row by row; `options` are those of `subplots`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options).flatten().tolist()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    return figure, panels


def write_picture(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)  # needs no screen
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH, format="png")
    except OSError as error:
        raise ConfigError(f"The plot {path} cannot be written ({error.strerror}).") from None


_WHOLE_LINES = 100_000
"""Columns of what is no terminal: a file or another program gets each line whole."""

_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal, turn the line around, or cannot be written."""


def printer(*, is_error: bool = False, soft_wrap: bool = False) -> Console:
    """Return a console for stdout, or stderr, which prints every text as it is.

    It knows no markup: names of models, replicas and counters come from others. A part that has a
    style is a `rich.text.Text`. With `soft_wrap` the terminal breaks its lines.
    """
    stream = sys.stderr if is_error else sys.stdout
    return Console(
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=soft_wrap,
        width=None if stream.isatty() else _WHOLE_LINES,
        file=stream,
    )


def visible(told: Any) -> Any:
    """Return what others told, plain data, with control characters in its texts written out."""
    if isinstance(told, str):
        return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], told)
    if isinstance(told, Mapping):
        return {visible(key): visible(value) for key, value in told.items()}
    if isinstance(told, list | tuple):
        return [visible(one) for one in told]
    return told


def empty_table(
    *columns: str,
    numbers: Sequence[str] = (),
    rest: Sequence[str] = (),
    title: str | None = None,
    folds: bool = False,
) -> Table:
    """Return a table with `columns`, then `numbers`, which stand right, and then the `rest`.

    Too wide a table cuts its numbers short first; with `folds` its columns take several lines.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE, collapse_padding=True)
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=not folds)
    for name in numbers:
        table.add_column(name, justify="right")
    for name in rest:
        table.add_column(name)
    return table


EXIT_FAILED = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def stdout_kept() -> AbstractContextManager[Any]:
    """Send to stderr what Ray prints meanwhile, such as the death of a node."""
    return contextlib.redirect_stdout(sys.stderr)


@contextlib.contextmanager
def boundary(*, verbose: bool) -> Iterator[Interrupts]:
    """Run a command's body.

    typer.Exit: with `EXIT_ERROR` after an error of ours. Its message went to stderr, or its
    traceback with `verbose`. With `EXIT_INTERRUPTED` after Ctrl-C or SIGTERM.
    """
    interrupts = Interrupts()
    try:
        with interrupts.caught():
            try:
                os.getcwd()  # without it every relative path would fail
            except OSError:
                says = "The working directory was removed; change to one that exists."
                raise ConfigError(says) from None
            yield interrupts
    except (KVRayError, KeyboardInterrupt) as error:
        is_interrupted = isinstance(error, KeyboardInterrupt)
        if verbose:
            Console(stderr=True).print_exception()
        else:
            says = "interrupted." if is_interrupted else visible(" ".join(str(error).split()))
            print(f"kvray: {says}", file=sys.stderr)  # in one line
        raise typer.Exit(EXIT_INTERRUPTED if is_interrupted else EXIT_ERROR) from None

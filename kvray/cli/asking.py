"""The way from a command to the tier: a client, sizes and token ids, the answer on stdout."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType

from kvray.actors.hosts import named
from kvray.config import load_config, parse_size
from kvray.config.values import parse_seconds
from kvray.console.interrupts import masked
from kvray.console.options import VerboseOption
from kvray.console.output import boundary, printer, stdout_kept, visible
from kvray.errors import ConfigError

if TYPE_CHECKING:
    from kvray.client import Client


def bounded(body: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has `--verbose` and runs `body` inside a `boundary`.

    Its interrupts are handed to a body that takes `interrupts`.
    """
    told = signature(body, eval_str=True)
    if "verbose" in told.parameters:
        return body  # it has a boundary of its own
    shown = [one for one in told.parameters.values() if one.name != "interrupts"]

    @wraps(body)
    def command(*, verbose: bool, **options: Any) -> None:
        with boundary(verbose=verbose) as interrupts:
            if len(shown) < len(told.parameters):
                options["interrupts"] = interrupts
            body(**options)

    last = Parameter("verbose", Parameter.KEYWORD_ONLY, default=False, annotation=VerboseOption)
    vars(command)["__signature__"] = told.replace(parameters=[*shown, last])
    return command


@contextmanager
def open_client(config: Path | None, address: str | None) -> Iterator["Client"]:
    """Give a client of the tier; what is printed meanwhile, as by Ray, goes to stderr."""
    settings = load_config(config, overrides={"ray.address": address})
    with masked():
        from kvray.client import Client

    with stdout_kept(), Client(settings) as client:
        yield client


def read_tokens(path: Path) -> list[int]:
    """Return the token ids in a file: one JSON list, or numbers between white space; - is stdin."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        found = json.loads(text) if "[" in text else [int(one) for one in text.split()]
    except (OSError, ValueError, RecursionError, AttributeError) as error:  # stdin may be closed
        raise ConfigError(f"{path} cannot be read as token ids ({error}).") from None
    if not isinstance(found, list) or not found or any(type(token) is not int for token in found):
        raise ConfigError(
            f"{path} must have token ids: one JSON list such as [1, 15043], or numbers between"
            " white space."
        )
    return found


def duration(text: str, low: float, high: float) -> Any:
    """Return an option for a time, such as 30s or 1h, of at least `low` and at most `high`."""

    def parse(given: str | float) -> float:
        seconds = parse_seconds(given)
        if not isinstance(seconds, int | float):
            raise typer.BadParameter(f"{given!r} is no time; write for example 30s, 10m or 1h.")
        if not low <= seconds <= high:
            raise typer.BadParameter(f"{given} is not between {low:g}s and {high:g}s.")
        return seconds

    return typer.Option(metavar="TIME", help=text, parser=parse)


def parse_option(option: str, text: str) -> int:
    """Return the bytes of a size that the user gave."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}.") from None


def for_people(found: Any, *, with_ids: bool = False) -> Any:
    """Return what the tier told with nothing that a terminal obeys, and hosts for ids of nodes."""
    hosts = found.get("hosts", {}) if isinstance(found, dict) else {}
    return named(visible(found), visible(hosts), with_ids=with_ids)


def show_answer(
    found: Any,
    report: Callable[[Any], Iterable[RenderableType]],
    *,
    as_json: bool,
    with_ids: bool = False,
) -> None:
    """Print `found` as one JSON object, or for people the texts and tables of its `report`."""
    if as_json:
        print(json.dumps(found, indent=2, default=str))
        return
    console = printer()
    for part in report(for_people(found, with_ids=with_ids)):
        console.print(part, soft_wrap=isinstance(part, str))

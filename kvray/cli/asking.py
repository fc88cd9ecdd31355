"""The way from a command to the tier: its configuration, a client, and the answer on stdout."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvray.config import load_config
from kvray.console.boundary import stdout_kept
from kvray.console.interrupts import Interrupts

if TYPE_CHECKING:
    from kvray.client import Client


@contextmanager
def open_client(
    config: Path | None, address: str | None, interrupts: Interrupts
) -> Iterator["Client"]:
    """Give a client of the tier; what is printed meanwhile, as by Ray, goes to stderr."""
    settings = load_config(config, overrides={"ray.address": address})
    with interrupts.masked():
        from kvray.client import Client

    with stdout_kept(), Client(settings) as client:
        yield client


def show_answer(found: Any, printed: Callable[[Any], None], *, as_json: bool) -> None:
    """Print `found` as one JSON object, or as `printed` does for people."""
    if as_json:
        print(json.dumps(found, indent=2, default=str))
    else:
        printed(found)

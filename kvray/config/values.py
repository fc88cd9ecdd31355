"""What a setting's value may be, where a plain type would let too much pass."""

import re
import reprlib
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

LABEL_PATTERN = r"^[^=\s]+=[^=\s]+$"
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|sec|m|min|h)\s*")
_SECONDS_MAX = 366 * 86_400
"""More would be refused by the waits of Python and of the kernel."""
_SECONDS = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}


_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 80
_shown.maxlevel = 2


def shown(value: object) -> str:
    """Return a value as a sentence has it: short, whatever it is, aliases of YAML upon aliases."""
    return _shown.repr(value)


def parse_namespace(value: object) -> str:
    """Return the hex digits that a namespace's digest begins with, as given to name it."""
    if isinstance(value, str) and re.fullmatch(r"[0-9A-Fa-f]{1,64}", value):
        return value.lower()
    raise ValueError(
        f"{shown(value)} names no namespace; write the hex digits that `kvray status` shows, in"
        " quotes"
    )


def _plain_seconds(value: object) -> object:
    """Refuse what YAML or a person means otherwise; the rest is for the type to judge."""
    if isinstance(value, bool):
        raise ValueError(f"{value} is no number of seconds; write one such as 30")
    if isinstance(value, str) and (found := _DURATION.fullmatch(value)):
        seconds = float(found[1]) * _SECONDS[found[2]]
        raise ValueError(f"{value!r} has a unit; write the number of seconds, {seconds:g}")
    return value


def _bounded(seconds: float) -> float:
    if seconds > _SECONDS_MAX:
        raise ValueError(f"{seconds:g} seconds are more than a year; write a number such as 30")
    return seconds


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(
            f"{shown(str(path))} depends on where a process runs; write the whole path, from / on"
        )
    return path


def _listed(value: object) -> object:
    """Take text with commas for a list, as a variable of the environment has it."""
    return [one.strip() for one in value.split(",")] if isinstance(value, str) else value


Seconds = Annotated[float, BeforeValidator(_plain_seconds), AfterValidator(_bounded)]
"""A duration: a number without a unit, at most a year."""

AbsolutePath = Annotated[
    Path,
    AfterValidator(_absolute),
    WithJsonSchema({"type": "string", "pattern": "^/", "examples": ["/dev/shm"]}),
]

NamespaceName = Annotated[
    str,
    BeforeValidator(parse_namespace),
    WithJsonSchema({"type": "string", "pattern": "^[0-9A-Fa-f]{1,64}$"}),
]

Label = Annotated[str, Field(pattern=LABEL_PATTERN, examples=["kvray.io/pool=big"])]
"""A label of a Ray node, key=value."""

Listed = BeforeValidator(_listed)

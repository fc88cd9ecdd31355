"""What a setting's value may be, where a plain type would let too much pass."""

import re
import reprlib
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

LABEL_PATTERN = r"^[^=\s]+=[^=\s]+$"
DURATION = r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*"
_SECONDS_MAX = 366 * 86_400
"""More would be refused by the waits of Python and of the kernel."""
_SECONDS = {"ms": 0.001, None: 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_FORM = r"\s*(\d+(?:\.\d+)?)\s*({units})?\s*"
_MEANT = {"k": "KiB", "m": "MiB", "g": "GiB", "t": "TiB"}
"""What is meant by units that begin with these letters."""
_SIZE_MAX = 2**60
"""More bytes than any machine has, and few enough for every computation with them."""
_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": _SIZE_MAX},
        {"type": "string", "pattern": f"^{_FORM.format(units='|'.join(filter(None, _UNITS)))}$"},
    ],
    "examples": ["64GiB", "1.5TiB", "512MiB", 1073741824],
}


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
        f"{shown(value)} names no namespace; write the hex digits that `kvray ls` shows, in quotes"
    )


def parse_size(value: object) -> int:
    """Return a whole number, or text such as `64GiB`, in bytes; ValueError if it is no size."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        text = str(value) if isinstance(value, str | float) else ""
        found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
        if not found or found[2] not in _UNITS:
            says, remedy = f"{shown(value)} is no size", "write a number with a unit such as 64GiB"
            near = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt])i?b?\s*", text, re.IGNORECASE)
            if near:
                remedy = f"units are binary here: write {near[1]}{_MEANT[near[2].lower()]}"
            raise ValueError(f"{says}; {remedy}")
        size = int(Decimal(found[1]) * _UNITS[found[2]])
    if size <= 0:
        raise ValueError(f"{shown(value)} is not a positive size; write for example 64GiB")
    if size > _SIZE_MAX:
        raise ValueError(
            f"{shown(value)} is more than any machine has; write at most {exact_size(_SIZE_MAX)}"
        )
    return size


def format_size(size: float) -> str:
    """Return `size` bytes in the largest binary unit that keeps it above one."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.4g}{unit}"
    return f"{size:.0f}B"


def exact_size(size: int) -> str:
    """Return `size` bytes, which may be 0, in the largest unit of which it is a whole number."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return f"{size}B"


def parse_seconds(value: object) -> object:
    """Return the seconds of a number, or of text such as `30s`, and anything else as it is."""
    if isinstance(value, bool):
        raise ValueError(f"{value} is no number of seconds; write one such as 30")
    if isinstance(value, str) and (found := re.fullmatch(DURATION, value)):
        return float(found[1]) * _SECONDS[found[2]]
    return value


def _bounded(seconds: float) -> float:
    if seconds > _SECONDS_MAX:
        raise ValueError(f"{seconds:g} seconds are more than a year; write for example 30s or 1h")
    return seconds


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(
            f"{shown(str(path))} depends on where a process runs; write the whole path, from / on"
        )
    return path


Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(exact_size, return_type=str, when_used="json"),
    WithJsonSchema(_SCHEMA),
]
"""Bytes; in files and in what is shown also text such as `64GiB`."""

Seconds = Annotated[float, BeforeValidator(parse_seconds), AfterValidator(_bounded)]
"""A duration of at most a year: a number of seconds, or text such as `30s`."""

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

Listed = BeforeValidator(
    lambda value: [one.strip() for one in value.split(",")] if isinstance(value, str) else value
)
"""Takes text with commas for a list, as a variable of the environment has it."""

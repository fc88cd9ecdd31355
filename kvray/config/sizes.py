"""Sizes in bytes, written with binary units."""

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from kvray.config.values import shown

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


def parse_size(value: object) -> int:
    """Return a whole number, or text such as `64GiB`, in bytes; ValueError if it is no size."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        text = str(value) if isinstance(value, str | float) else ""
        found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
        if not found or found[2] not in _UNITS:
            raise ValueError(f"{shown(value)} is no size; {_remedy(text)}")
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


def _remedy(text: str) -> str:
    """Return what to write in place of what has no unit of ours."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt])i?b?\s*", text, re.IGNORECASE)
    if found:
        return f"units are binary here: write {found[1]}{_MEANT[found[2].lower()]}"
    return "write a number with a unit such as 64GiB"


Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(exact_size, return_type=str, when_used="json"),
    WithJsonSchema(_SCHEMA),
]
"""Bytes; in files and in what is shown also text such as `64GiB`."""

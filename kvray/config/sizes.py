"""Sizes in bytes, written with binary units."""

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_size(value: object) -> int:
    """Return `value` in bytes: a whole number, or text such as `64GiB`.

    Raises:
        ValueError: no such unit, or the size is not positive.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        if not found or found[2] not in _UNITS:
            raise ValueError(f"{value!r} is no size; write a number with a unit such as 64GiB")
        size = int(Decimal(found[1]) * _UNITS[found[2]])
    if size <= 0:
        raise ValueError(f"{value!r} is not a positive size; write for example 64GiB")
    return size


def format_size(size: float) -> str:
    """Return `size` bytes in the largest binary unit that keeps it above one."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.4g}{unit}"
    return f"{size:.0f}B"


Size = Annotated[int, BeforeValidator(parse_size)]

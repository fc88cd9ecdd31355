"""The fields of a trace's records: checked, with errors that say where."""

from __future__ import annotations

import json
import math
from typing import Any

from kvray.errors import ConfigError


class Record:
    """One JSON object of a trace, and where it stands."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        """Wrap `values`, which errors call `where`."""
        self.values = values
        self.where = where

    def number(self, name: str) -> float:
        """Return a number that is not negative."""
        value: Any = self.values.get(name)
        if type(value) in (int, float) and math.isfinite(value) and value >= 0:
            return float(value)
        raise self._wrong(name, "a number from 0 on")

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number that is not negative; `default`, if there is one, for none."""
        value = self.values.get(name, default)
        if type(value) is not int or not 0 <= value < 2**63:
            raise self._wrong(name, "a whole number from 0 on")
        return value

    def ids(self) -> list[int]:
        """Return the ids of the blocks."""
        value = self.values.get("hash_ids")
        if not isinstance(value, list) or not set(map(type, value)) <= {int}:
            raise self._wrong("hash_ids", "a list of whole numbers")
        if value and not -(2**63) <= min(value) <= max(value) < 2**63:
            raise self._wrong("hash_ids", "a list of whole numbers of 64 bits")
        return value

    def records(self, name: str) -> list[Record]:
        """Return the objects in a list."""
        value = self.values.get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return [
            Record(as_object(one, f"{self.where}, {name}[{at}]"), f"{self.where}, {name}[{at}]")
            for at, one in enumerate(value)
        ]

    def _wrong(self, name: str, what: str) -> ConfigError:
        shown = json.dumps(self.values[name])[:40] if name in self.values else "missing"
        return ConfigError(
            f"{self.where}: {name} must be {what}, and is {shown}; get the file again, or take the"
            " record out."
        )


def parse(text: bytes, where: str) -> Any:
    """Return the value that `text` is JSON of.

    Raises:
        ConfigError: it is none; the message names `where`.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        inside = f", line {error.lineno}" if error.lineno > 1 else ""
        reason = f"{error.msg} at character {error.colno}"
    except UnicodeDecodeError:
        inside, reason = "", "it is no UTF-8"
    except (ValueError, RecursionError) as error:  # a number or a nesting without bounds
        inside, reason = "", str(error)
    raise ConfigError(f"{where}{inside} is no JSON ({reason}); get the file again, or take it out.")


def as_object(value: Any, where: str) -> dict[str, Any]:
    """Return `value`, which must be an object."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is no JSON object; get the file again, or take the record out.")
    return value

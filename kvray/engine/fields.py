"""Reads the fields of an engine's objects, which differ from version to version.

Arguments are pydantic models or dataclasses, requests may be C++ objects with Python attributes
beside them. Settings are texts or enumerations. Every field is read with a default, and none is
ever written.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from numbers import Integral, Real
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

_NO_FIELD = "kvray_asks_for_no_such_field"


def field_of(source: Any, name: str) -> Any:
    """Return a field of an engine's object; None if it is not there.

    A value that has every attribute one asks for was made up by the asking: it is no value.
    """
    value = getattr(source, name, None)
    return None if value is None or hasattr(value, _NO_FIELD) else value


def number_of(source: Any, name: str, default: int) -> int:
    """Return a whole number, `default` where there is none."""
    value = field_of(source, name)
    return value if isinstance(value, int) else default


def are_whole(values: Any) -> bool:
    """Whether `values` is a whole number, or lists of such, of lists and so on."""
    if isinstance(values, list | tuple):
        return all(map(are_whole, values))
    return type(values) is int


def text_of(source: Any, name: str) -> str:
    """Return a text, or the name of an enumeration's member; empty where there is neither."""
    value = field_of(source, name)
    if not isinstance(value, str):
        value = getattr(value, "name", "")
    # Some enumerations are texts whose `str` has the name of their class in it.
    return str.__str__(value) if isinstance(value, str) else ""


def canonical_text(source: Any, names: Iterable[str]) -> str:
    """Return the named fields that are set as one text, see `to_text`."""
    values = {name: field_of(source, name) for name in names}
    return to_text({name: value for name, value in values.items() if value is not None})


def to_text(value: Any) -> str:
    """Return `value` as JSON that is equal for equal values in every process."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Return `value` as JSON has it.

    Of an object that is no record only its type's name is kept: its own text may hold its
    address, which would give every process a namespace of its own.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, (Integral, Real)):
        return int(value) if isinstance(value, Integral) else float(value)  # numpy's
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(one) for one in value), key=json.dumps)
    names = _record_fields(value)
    if names is None:
        kind = value if isinstance(value, type) else type(value)
        return f"{kind.__module__}.{kind.__qualname__}"
    return {name: _plain(getattr(value, name, None)) for name in names}


def _record_fields(value: Any) -> list[str] | None:
    """Return the names of a record's fields; None for any other object."""
    declared = getattr(type(value), "model_fields", None)  # pydantic's
    if isinstance(declared, Mapping):
        return list(declared)
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return list(vars(value)) if isinstance(value, SimpleNamespace) else None

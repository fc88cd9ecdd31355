"""Every effective value as one would write it, with where it came from."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from kvray.config.document import SettingPath
from kvray.config.layers import DEFAULT, Origin
from kvray.config.sources import Effective


class Setting(NamedTuple):
    """One value that holds."""

    name: str
    """Dotted; entries of a list by their number."""
    value: Any
    """As JSON: sizes with their unit."""
    origin: Origin

    @property
    def is_default(self) -> bool:
        """Whether nobody has set it."""
        return self.origin is DEFAULT


def effective_settings(effective: Effective) -> list[Setting]:
    """Return every setting, in the order of the schema; entries of mappings and nodes apart."""
    settings = []
    for path, value, depth in _walk(effective.config.model_dump(mode="json"), (), effective.config):
        written = tuple(part.lower() for part in path)
        origin = effective.layers.origin_of(written, at_least=depth)
        settings.append(Setting(".".join(path), value, origin))
    return settings


def _walk(
    values: dict[str, Any], at: SettingPath, section: BaseModel
) -> Iterator[tuple[SettingPath, Any, int]]:
    """Yield path and value of each setting, and how many names of the path are the setting's.

    What is below may have been given with the whole of it, but never with its section.
    """
    for name, value in values.items():
        path = (*at, name)
        if isinstance(below := getattr(section, name), BaseModel):
            yield from _walk(value, path, below)
        else:
            for rest, one in _leaves(value):
                yield (*path, *rest), one, len(path)


def _leaves(value: Any) -> Iterator[tuple[SettingPath, Any]]:
    """Yield what a mapping, or a list of mappings, holds; anything else is one value."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(index): one for index, one in enumerate(value)}
    if not isinstance(value, dict) or not value:
        yield (), value
        return
    for name, below in value.items():
        if below == {}:
            continue  # an entry of `nodes` that leaves a section as it is
        for rest, one in _leaves(below):
            yield (name, *rest), one

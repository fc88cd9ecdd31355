"""Values from several sources laid over each other, and which source each of them has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvray.config.document import Document, SettingPath
from kvray.config.environment import variable_of
from kvray.config.values import shown
from kvray.errors import ConfigError

Kind = Literal["default", "file", "environment", "command line", "node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value comes from."""

    kind: Kind
    where: str = ""
    """File and line, or the variable; empty where `kind` says it all."""

    def __str__(self) -> str:
        return self.where or self.kind


DEFAULT = Origin(kind="default")
COMMAND_LINE = Origin(kind="command line")


@dataclass(slots=True)
class Layers:
    """What is given so far; what is put later lies above."""

    values: dict[str, Any] = field(default_factory=dict)
    """Section -> key -> value, as a file has it."""
    origins: dict[SettingPath, Origin] = field(default_factory=dict)
    """Of everything that was given, sections included."""

    @classmethod
    def of_document(cls, name: str, document: Document) -> "Layers":
        """Begin with what a file of that name says."""
        origins = {
            at: Origin(kind="file", where=f"{name}:{line}") for at, line in document.lines.items()
        }
        return cls(document.values, origins)

    def put(self, dotted: str, value: Any, origin: Origin) -> None:
        """Lay one value over what is there.

        Raises:
            ConfigError: there is a value where its section should be.
        """
        path = tuple(dotted.split("."))
        put_value(self.values, path, value)
        for length in range(1, len(path)):
            self.origins.setdefault(path[:length], origin)
        self.origins[path] = origin

    def put_environment(self, given: Mapping[str, str]) -> None:
        """Lay what the environment says over what is there."""
        for dotted, value in given.items():
            origin = Origin(kind="environment", where=variable_of(dotted))
            self.put(dotted, value, origin)

    def put_overrides(self, given: Mapping[str, Any]) -> None:
        """Lay what a caller says over what is there; None is no value."""
        for dotted, value in given.items():
            if value is not None:
                self.put(dotted, value, COMMAND_LINE)

    def origin_of(self, path: SettingPath, *, at_least: int = 1) -> Origin:
        """Return the origin of a value, or of what it was given as a part of.

        Args:
            path: of the value.
            at_least: names that what was given must have: 1 takes that of the section too.
        """
        for length in range(len(path), at_least - 1, -1):
            if (found := self.origins.get(path[:length])) is not None:
                return found
        return DEFAULT


def put_value(values: dict[str, Any], path: SettingPath, value: Any) -> None:
    """Set one value of nested sections, which are made where they are missing.

    Raises:
        ConfigError: there is a value where its section should be.
    """
    *sections, key = path
    for depth, section in enumerate(sections, 1):
        if values.get(section) is None:
            values[section] = {}
        if not isinstance(values[section], dict):
            raise ConfigError(
                f"{'.'.join(path[:depth])} must be a section with keys, not"
                f" {shown(values[section])}; {'.'.join(path)} cannot be set in it."
            )
        values = values[section]
    values[key] = value

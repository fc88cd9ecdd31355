"""Values from several sources, later ones on top, and the source of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kvray.config.document import SettingPath
from kvray.config.environment import variable_of
from kvray.config.values import shown
from kvray.errors import ConfigError

Kind = Literal["default", "file", "environment", "command line", "node"]


class Origin(NamedTuple):
    """Where a value comes from."""

    kind: Kind
    where: str = ""
    """File and line, or the variable; empty if `kind` says everything."""

    def __str__(self) -> str:
        return self.where or self.kind


DEFAULT = Origin("default")


@dataclass(slots=True)
class Layers:
    """The values so far; a later one wins."""

    values: dict[str, Any] = field(default_factory=dict)
    """Section -> key -> value, as a file has it."""
    origins: dict[SettingPath, Origin] = field(default_factory=dict)
    """The origin of everything that was given, sections included."""

    def put(self, dotted: str, value: Any, origin: Origin) -> None:
        """Set one value, over the earlier ones."""
        path = tuple(dotted.split("."))
        values = self.values
        for depth, section in enumerate(path[:-1], 1):
            if values.get(section) is None:
                values[section] = {}
            if not isinstance(values[section], dict):
                raise ConfigError(
                    f"{'.'.join(path[:depth])} must be a section with keys, not"
                    f" {shown(values[section])}; {dotted} cannot be set in it."
                )
            values = values[section]
        values[path[-1]] = value
        for length in range(1, len(path)):
            self.origins.setdefault(path[:length], origin)
        self.origins[path] = origin

    def put_environment(self, given: Mapping[str, str]) -> None:
        """Set what the environment says."""
        for dotted, value in given.items():
            self.put(dotted, value, Origin("environment", variable_of(dotted)))

    def origin_of(self, path: SettingPath, *, at_least: int = 1) -> Origin:
        """Return the origin of a value, or of the mapping or section that it was given with.

        Of the path's names, the first `at_least` count in any case; 1 is a section's.
        """
        for length in range(len(path), at_least - 1, -1):
            if (found := self.origins.get(path[:length])) is not None:
                return found
        return DEFAULT

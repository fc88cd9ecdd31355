"""A YAML file of settings, and the line of each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from kvray.errors import ConfigError

_BYTES_MAX = 2**20
_DEPTH_MAX = 6
"""Deeper than any setting lies; what is below belongs to the value above."""

_REMEDIES = {
    "'\\t'": "indent with spaces, not with tabs",
    "tag": "write the plain value, without a tag",
    "mapping values are not allowed": "put each key on a line of its own, and a text with a colon"
    " in quotes",
    "": "check indentation, brackets and quotes there",
}
"""What to do, by a part of what the parser says."""

SettingPath = tuple[str, ...]
"""Names from the top on, as in ("arena", "capacity"); entries of a list by their number."""


class Origin(NamedTuple):
    """Where a value comes from."""

    kind: Literal["default", "file", "environment", "command line", "node"]
    where: str = ""
    """File and line, or the variable; empty if `kind` says everything."""

    def __str__(self) -> str:
        return self.where or self.kind


DEFAULT = Origin("default")


class Origins(dict[SettingPath, Origin]):
    """The origin of everything that was given, sections included; a later source wins."""

    def put(self, path: SettingPath, origin: Origin) -> None:
        """Note where a value comes from; a section belongs to the first source that has it."""
        for length in range(1, len(path)):
            self.setdefault(path[:length], origin)
        self[path] = origin

    def of(self, path: SettingPath, *, at_least: int = 1) -> Origin:
        """Return the origin of a value, or of the mapping or section that it was given with.

        Of the path's names, the first `at_least` count in any case; 1 is a section's.
        """
        parts = (path[:length] for length in range(len(path), at_least - 1, -1))
        return next((self[part] for part in parts if part in self), DEFAULT)


def read_document(path: Path) -> tuple[dict[str, Any], Origins]:
    """Return what a file says, and in which line, counted from 1.

    ConfigError: it is no mapping in YAML, or says one thing twice.
    """
    text = _read_text(path)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        values = None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ConfigError(_not_yaml(path, error)) from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; check its brackets.") from None
    except ValueError as error:  # of a date or a number that YAML knows by its form only
        raise ConfigError(f"{path} is not valid YAML: {error}; put the value in quotes.") from None
    if root is None or values is None:
        return {}, Origins()
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} must hold a mapping of settings, not a {type(values).__name__}; begin with"
            " lines such as `arena:` and, below and indented, `capacity: 64GiB`."
        )
    origins = Origins(_lines(root, (), path, set()))
    return {str(name): value for name, value in values.items()}, origins


def _read_text(path: Path) -> str:
    try:
        if path.is_fifo():  # opening it would wait for a writer, for ever
            raise ConfigError(
                f"{path} is a pipe, but every part of the tier reads the configuration; name a"
                " file."
            )
        with path.open("rb") as file:
            raw = file.read(_BYTES_MAX + 1)
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a directory and cannot be read; name the file in it, such as"
            f" {path / 'kvray.yaml'}."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"The configuration file {path} cannot be read ({error.strerror}); name an existing"
            " file that this user may read."
        ) from None
    if len(raw) > _BYTES_MAX:
        raise ConfigError(f"{path} has more than {_BYTES_MAX} bytes; name a file of settings.")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is no UTF-8 text (byte {error.start} is {error.object[error.start]:#04x});"
            " save it as UTF-8."
        ) from None


def _lines(
    node: yaml.Node, at: SettingPath, path: Path, visited: set[int]
) -> Iterator[tuple[SettingPath, Origin]]:
    """Yield the line of everything; an alias has the line of what it repeats.

    A key that stands twice in one mapping is refused: YAML would take the last.
    """
    if len(at) > _DEPTH_MAX or id(node) in visited:
        return
    visited.add(id(node))
    entries: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        entries = [(str(index), item, item) for index, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        entries = [(str(key.value), key, value) for key, value in node.value]
    seen: dict[str, int] = {}
    for name, begin, value in entries:
        line, below = begin.start_mark.line + 1, (*at, name.lower())
        if name in seen:
            raise ConfigError(
                f"{path}:{line}: {'.'.join((*at, name))} stands in line {seen[name]} already; keep"
                " one of the two."
            )
        seen[name] = line
        yield below, Origin("file", f"{path}:{line}")
        yield from _lines(value, below, path, visited)


def _not_yaml(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    said = getattr(error, "problem", None) or " ".join(str(error).split())
    remedy = next(remedy for part, remedy in _REMEDIES.items() if part in said)
    return f"{where}: this is not valid YAML: {said}; {remedy}."

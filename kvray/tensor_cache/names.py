"""The names under which the caches of this process report; each is unique in its place."""

import threading
from pathlib import Path

Place = tuple[Path, int]
"""Directory of the tier, and rank."""

_taken: set[tuple[Place, str]] = set()
_lock = threading.Lock()


def claim_name(place: Place, name: str) -> str:
    """Return `name`, with a number behind it if another cache here reports under it."""
    with _lock:
        unique, number = name, 1
        while (place, unique) in _taken:
            number += 1
            unique = f"{name}.{number}"
        _taken.add((place, unique))
        return unique


def release_name(place: Place, name: str) -> None:
    """Let another cache have the name."""
    with _lock:
        _taken.discard((place, name))

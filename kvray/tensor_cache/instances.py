"""The caches of this process by id, and the names that they report."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvray.config import KVRayConfig
from kvray.errors import ConfigError
from kvray.tensor_cache.metadata import TensorMetadata

if TYPE_CHECKING:
    from kvray.tensor_cache.cache import TensorCache

Place = tuple[Path, int]
"""Directory of the tier, and rank."""


class Instances:
    """Registry of caches by id; a closed cache, or one of a forked parent, does not count."""

    def __init__(self) -> None:
        self._caches: dict[str, TensorCache] = {}
        self._names: set[tuple[Place, str]] = set()
        # Held while a cache is made, so that two threads that ask for one id get one cache.
        self._making = threading.Lock()
        self._naming = threading.Lock()

    def get_or_create(
        self,
        instance_id: str,
        config: KVRayConfig,
        metadata: TensorMetadata,
        make: "Callable[[], TensorCache]",
    ) -> "TensorCache":
        """Return the cache of this id, made by `make` if there is none.

        Raises:
            ConfigError: there is one with another configuration or metadata.
        """
        with self._making:
            found = self.get(instance_id)
            if found is None:
                found = self._caches[instance_id] = make()
            _check_same(instance_id, found, config, metadata)
            return found

    def get(self, instance_id: str) -> "TensorCache | None":
        """Return the cache of this id, or None."""
        found = self._caches.get(instance_id)
        return None if found is None or found.closed else found

    def pop(self, instance_id: str) -> "TensorCache | None":
        """Forget the cache of this id and return it; None if there is none."""
        with self._making:
            found = self.get(instance_id)
            self._caches.pop(instance_id, None)
            return found

    def claim_name(self, place: Place, name: str) -> str:
        """Return `name`, with a number behind it if another cache here reports under it."""
        with self._naming:
            unique, number = name, 1
            while (place, unique) in self._names:
                number += 1
                unique = f"{name}.{number}"
            self._names.add((place, unique))
            return unique

    def release_name(self, place: Place, name: str) -> None:
        """Let another cache have the name."""
        with self._naming:
            self._names.discard((place, name))


def _check_same(
    instance_id: str, found: "TensorCache", config: KVRayConfig, metadata: TensorMetadata
) -> None:
    different = found.metadata.difference(metadata)
    if found.config != config:
        different.append("the configuration")
    if different:
        raise ConfigError(
            f"The TensorCache {instance_id!r} exists with other values of {', '.join(different)};"
            " destroy it first, or choose another instance id."
        )

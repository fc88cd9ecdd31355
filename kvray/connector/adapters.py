"""The LoRA adapters of one engine, each told from every other by the bytes that the engine read."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kvray.block import frame
from kvray.config import cache_dir
from kvray.fingerprint import fingerprint_model, stamp_model

_ADAPTERS_MAX = 2**16
"""Adapters remembered; requests of further ones bypass the cache until the engine starts anew."""


@dataclass(slots=True)
class _Adapter:
    path: str
    stamp: str
    fingerprint: str
    has_changed: bool = False


class Adapters:
    """Fingerprints of adapters, for the leader alone; its executor thread is the only caller.

    TensorRT-LLM reads an adapter at the first request of its task and keeps it under the task's
    number: it notices neither another path nor other bytes at the path, until it drops the adapter
    and reads it anew. Once a task's files are not what they were, nobody can tell from here which
    ones the engine computes with, so its requests bypass the cache from then on. Whether they are
    is asked at every request, which costs a look at the directory and at each file of weights or
    configuration in it, not at their content. Content is read at the first request of a task, and
    not even then if it is known on this machine.
    """

    def __init__(self, *, settings: str, cache_dir: Path | None) -> None:
        """Know no adapter.

        Args:
            settings: `EngineArgs.adapters`; engines that read adapters differently do not share.
            cache_dir: where fingerprints outlive the process; None: nowhere.
        """
        self._settings = settings.encode()
        self._cache_dir = cache_dir
        self._known: dict[int, _Adapter] = {}

    def fingerprint(self, task_id: int, path: str) -> bytes | None:
        """Return what tells the adapter from every other one; None: that is not known.

        Args:
            task_id: the engine's number of the adapter.
            path: where the engine reads it.

        Raises:
            ConfigError: there is no adapter at `path`, or it cannot be read.
        """
        known = self._known.get(task_id)
        if known is None:
            if len(self._known) >= _ADAPTERS_MAX:
                return None
            known = self._known[task_id] = self._read(path)
        elif not known.has_changed and (path != known.path or stamp_model(path) != known.stamp):
            now = self._read(path)
            # Other files may have come and gone beside those that count.
            known.has_changed = (now.path, now.fingerprint) != (known.path, known.fingerprint)
            known.stamp = now.stamp
        if known.has_changed:
            return None
        return hashlib.sha256(frame(known.fingerprint.encode(), self._settings)).digest()

    def _read(self, path: str) -> _Adapter:
        stamp = stamp_model(path)  # first: a change while it is read shows at the next request
        return _Adapter(path, stamp, fingerprint_model(path, cache_dir=self._cache_dir))


def fingerprints_dir() -> Path:
    """Return where fingerprints of checkpoints and adapters are cached."""
    return cache_dir() / "fingerprints"

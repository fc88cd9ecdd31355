"""The LoRA adapters of one engine, each told from every other by the bytes that the engine read."""

import hashlib
import logging
import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from kvray.config import cache_dir
from kvray.errors import ConfigError
from kvray.identity.block import frame
from kvray.identity.fingerprint import fingerprint_model, stamp_model

_log = logging.getLogger("kvray.connector")

_ADAPTERS_MAX = 2**16
"""Adapters remembered; requests of further ones bypass the cache until the engine restarts."""
_READINGS_MAX = 4
"""Adapters read at once."""
_WAIT_S = 0.05
"""How long the first request of an adapter waits for it to be read; then it bypasses the cache."""


@dataclass(slots=True, kw_only=True)
class _Adapter:
    path: str
    stamp: str
    fingerprint: "Future[str]"  # crosses from the thread that reads the files
    has_changed: bool = False


class Adapters:
    """Fingerprints of adapters, for the leader alone; its executor thread is the only caller.

    An engine reads an adapter at the first request of its task and notices neither another path
    nor other bytes there, until it drops the adapter and reads it again. Once a task's files have
    changed, nobody can tell from here which ones the engine computes with, so its requests bypass
    the cache from then on. Each request looks at the files' stamps, some 30 us; a thread reads
    their content once, unless it is known on this machine. Files that are replaced between the
    engine's reading and the task's first request here go unnoticed: give a new version of an
    adapter a new number.
    """

    def __init__(self, *, settings: str, cache_dir: Path | None) -> None:
        self._settings = settings.encode()
        self._cache_dir = cache_dir
        self._known: dict[int, _Adapter] = {}
        self._readings: list[Future[str]] = []

    def fingerprint(self, task_id: int, path: str) -> bytes | None:
        """Return what tells an adapter, by the engine's number and path, from every other one.

        None: that is not known, or not yet. ConfigError: there is none, or it cannot be read.
        """
        known = self._known.get(task_id)
        if known is None:
            known = self._read(task_id, path)
        elif not known.has_changed and (path != known.path or stamp_model(path) != known.stamp):
            known.has_changed = True
            _log.warning(
                "kvray: the files of LoRA adapter %d at %s are not those of its first request, and"
                " the engine may have either; its requests bypass the cache until the engine"
                " restarts. Give a new version of an adapter a new number.",
                task_id,
                path,
            )
        if known is None or known.has_changed or not known.fingerprint.done():
            return None
        if known.fingerprint.exception() is not None:
            del self._known[task_id]  # the next request tries again
        found = known.fingerprint.result().encode()
        return hashlib.sha256(frame(found, self._settings)).digest()

    def _read(self, task_id: int, path: str) -> _Adapter | None:
        """Have an adapter read and wait a little; None: too many are known or being read."""
        self._readings = [reading for reading in self._readings if not reading.done()]
        if len(self._known) >= _ADAPTERS_MAX or len(self._readings) >= _READINGS_MAX:
            return None
        # The stamp comes first: what changes while it is read shows at the next request.
        stamp, fingerprint = stamp_model(path), Future[str]()
        threading.Thread(
            target=_fulfil,
            args=(fingerprint, path, self._cache_dir),
            name="kvray-adapter",
            daemon=True,
        ).start()
        self._readings.append(fingerprint)
        wait([fingerprint], timeout=_WAIT_S)
        known = _Adapter(path=path, stamp=stamp, fingerprint=fingerprint)
        self._known[task_id] = known
        return known


def fingerprints_dir() -> Path:
    """Return where fingerprints of checkpoints and adapters are cached."""
    return cache_dir() / "fingerprints"


def _fulfil(promise: "Future[str]", path: str, cache_dir: Path | None) -> None:
    try:
        promise.set_result(fingerprint_model(path, cache_dir=cache_dir))
    except ConfigError as error:  # raised where the fingerprint is asked for
        promise.set_exception(error)
    except BaseException as error:  # noqa: BLE001 - whoever asks must not wait for ever
        promise.set_exception(ConfigError(f"The adapter at {path} was not read ({error!r})."))

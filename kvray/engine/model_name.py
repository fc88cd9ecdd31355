"""What a namespace calls the engine's model: a `model_key`, or the fingerprint of its checkpoint.

A fingerprint takes as long as reading the checkpoint does, so it is found out in the background
while the engine starts and serves. Until then nothing has keys: nothing is promised or saved.

`Adapters` are its LoRA adapters, each identified by the bytes that the engine read.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvray.config import cache_dir
from kvray.errors import ConfigError
from kvray.identity.block import frame
from kvray.identity.fingerprint import Progress, fingerprint_model, stamp_model

_log = logging.getLogger("kvray.connector")

_LOG_S = 30.0
_STOP_S = 5.0


class ModelName:
    """The name of one engine's model.

    Only the threads that read the checkpoint write `name`, `failure` and the progress; `_stopped`
    ends them.
    """

    def __init__(self, model: str, model_key: str | None, *, cache_dir: Path) -> None:
        """Begin to find out, if there is no `model_key`; `cache_dir` keeps files' digests."""
        self.name = "" if model_key is None else f"key:{model_key}"
        """Empty while it is not known."""
        self.is_given = model_key is not None
        self.failure = ""
        """Why it will not be known, as a sentence; empty: it is, or may still be."""
        self._model = model
        self._cache_dir = cache_dir
        self._stamp = ""
        """Of the files when the engine started: it may have read what they were then."""
        self._progress = Progress()
        self._began_at = self._logged_at = 0.0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if not self.is_given:
            try:
                self._start()
            except ConfigError as error:
                _log.debug("kvray: %s", error)  # `find` raises it, where the engine's start fails

    def find(self, wait_s: float) -> str:
        """Return the name, "" if not known within `wait_s`; ConfigError: there is no checkpoint."""
        if not self.name and not self.failure:
            self._start().join(wait_s)
        if not self.name and not self.failure:
            self._log_progress("is being read to tell it from others")
        return self.name

    def counters(self) -> dict[str, int]:
        """Return how far it is, for `kvray status`; nothing once it is known."""
        if self.name:
            return {}
        return {
            "fingerprint_bytes": self._progress.total_bytes,
            "fingerprint_bytes_read": self._progress.done_bytes,
            "fingerprint_failed": int(bool(self.failure)),
        }

    def close(self) -> None:
        """End the reading; `find` begins it again. Twice is fine."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopped.set()
            thread.join(_STOP_S)

    def _start(self) -> threading.Thread:
        if self._thread is not None:
            return self._thread
        if not self._model or not Path(self._model).exists():
            raise ConfigError(
                f"The checkpoint {self._model!r} is not on this machine, so it cannot be told from"
                " others; name model and revision in connector.model_key."
            )
        self._stamp = self._stamp or stamp_model(self._model)
        stopped = self._stopped = threading.Event()
        self._progress = Progress(on_step=lambda: self._step(stopped))
        self._began_at = self._logged_at = time.monotonic()
        self._thread = threading.Thread(
            target=self._read, args=(stopped,), name="kvray-model", daemon=True
        )
        self._thread.start()
        return self._thread

    def _read(self, stopped: threading.Event) -> None:
        try:
            found = fingerprint_model(
                self._model, cache_dir=self._cache_dir, progress=self._progress
            )
            if stamp_model(self._model) != self._stamp:
                raise ConfigError(
                    f"The files of {self._model} have changed since the engine started, so nobody"
                    " can tell which ones it has read; start it again."
                )
        except BaseException as error:  # noqa: BLE001 - whatever it is, the engine goes on without
            if not stopped.is_set():
                self.failure = str(error) or repr(error)
                _log.error("kvray: the engine goes on without the tier: %s", self.failure)
            return
        seconds = time.monotonic() - self._began_at
        _log.info("kvray: the checkpoint is told from others after %.1f s", seconds)
        self.name = f"sha256:{found}"

    def _step(self, stopped: threading.Event) -> None:
        if stopped.is_set():
            raise ConfigError("The reading of the checkpoint was stopped.")
        if time.monotonic() >= self._logged_at + _LOG_S:
            self._log_progress("is still being read")

    def _log_progress(self, what: str) -> None:
        self._logged_at = time.monotonic()
        done, total = self._progress.done_bytes, self._progress.total_bytes
        left_s = (total - done) / max(done, 1) * (self._logged_at - self._began_at)
        _log.warning(
            "kvray: the checkpoint %s, %.1f of %.1f GB%s; until then the engine goes without the"
            " tier. connector.model_key names the model at once.",
            what,
            done / 1e9,
            total / 1e9,
            f", about {left_s:.0f} s left" if left_s >= 1 else "",
        )


_ADAPTERS_MAX = 2**16
"""What adapters are known by; requests of further ones bypass until the engine restarts."""
_AT_ONCE_MAX = 4
"""Adapters read at once, and adapters whose files are looked at at once."""
_WAIT_S = 0.05
"""How long a request waits for either; then it bypasses the cache."""


@dataclass(slots=True, kw_only=True)
class _Adapter:
    path: str
    stamp: "Future[str] | None" = None  # of the first look; crosses from the thread that looks
    fingerprint: "Future[str] | None" = None  # crosses from the thread that reads the files
    has_changed: bool = False


class Adapters:
    """Fingerprints of adapters, for the leader alone; its executor thread is the only caller.

    An engine reads an adapter at the first request of its number and notices neither another path
    nor other bytes there, until it drops the adapter and reads it again. vLLM numbers each load
    of an adapter, and keeps blocks of earlier loads by name and path. So an adapter is known here
    by all that its engine goes by. Once its files have changed, or a number has another path,
    nobody can tell from here which ones the engine computes with, or has computed blocks with, so
    requests bypass the cache from then on. Source: `_gen_lora_extra_hash_keys` in
    `vllm/v1/core/kv_cache_utils.py` of vLLM 0.32.

    Each request looks at the files' stamps; their content is read once, unless it is known on this
    machine. Threads do both, as a file system may answer late or never; for a look that makes some
    0.1 ms of 30 us. While a look is late, its adapter bypasses; while `_AT_ONCE_MAX` are, all do.
    No request goes by an earlier one's look, since files may have been replaced in between. What
    goes unnoticed: files that are replaced between the engine's reading and the adapter's first
    look here, or between a request's look and a reading that the engine makes after it. So give a
    new version of an adapter a number, name and path of its own.
    """

    def __init__(self, *, settings: str, cache_dir: Path | None) -> None:
        self._settings = settings.encode()
        self._cache_dir = cache_dir
        self._known: dict[int | tuple[str, str], _Adapter] = {}
        self._looks: dict[str, Future[str]] = {}  # under way, by path
        self._readings: dict[str, Future[str]] = {}

    def fingerprint(self, task_id: int, path: str, *, cached_as: str = "") -> bytes | None:
        """Return what identifies an adapter, which the engine knows by number and path.

        `cached_as` is its name, if name and path are in the keys of the engine's own cache. None:
        that is not known, or not yet. ConfigError: there is none, or it cannot be read.
        """
        names = (task_id, (cached_as, path)) if cached_as else (task_id,)
        found = [self._known[name] for name in names if name in self._known]
        known = found[0] if found else _Adapter(path=path)
        if any(one is not known or one.path != path for one in found):
            _doubt(found, task_id, path)
        if len(found) < len(names) and len(self._known) >= _ADAPTERS_MAX:
            return None
        self._known.update(dict.fromkeys(names, known))
        look = None if known.has_changed else _begin(self._looks, path, partial(stamp_model, path))
        if look is None:
            return None
        # The stamp comes first: what changes while it is read shows at the next request.
        if known.stamp is None or known.stamp.exception() is not None:
            known.stamp = look
        if not look.done():
            return None
        if look.result() != known.stamp.result():
            _doubt([known], task_id, path)
            return None
        if known.fingerprint is None:
            read = partial(fingerprint_model, path, cache_dir=self._cache_dir)
            known.fingerprint = _begin(self._readings, path, read)
        if known.fingerprint is None or not known.fingerprint.done():
            return None
        reading = known.fingerprint
        if reading.exception() is not None:
            known.fingerprint = None  # the next request tries again
        return hashlib.sha256(frame(reading.result().encode(), self._settings)).digest()


def fingerprints_dir() -> Path:
    """Return where fingerprints of checkpoints and adapters are cached."""
    return cache_dir() / "fingerprints"


def _doubt(adapters: list[_Adapter], task_id: int, path: str) -> None:
    if all(one.has_changed for one in adapters):
        return
    for one in adapters:
        one.has_changed = True
    _log.warning(
        "kvray: the files of LoRA adapter %d at %s are not those of its first request, and the"
        " engine may have either; its requests bypass the cache until the engine restarts. Give a"
        " new version of an adapter a number, name and path of its own.",
        task_id,
        path,
    )


def _begin(
    under_way: "dict[str, Future[str]]", path: str, call: Callable[[], str]
) -> "Future[str] | None":
    """Have a thread call and wait a little; None: an earlier call or too many are under way."""
    for ended in [one for one, promise in under_way.items() if promise.done()]:
        del under_way[ended]
    if path in under_way or len(under_way) >= _AT_ONCE_MAX:
        return None
    promise = Future[str]()
    threading.Thread(
        target=_fulfil, args=(promise, path, call), name="kvray-adapter", daemon=True
    ).start()
    under_way[path] = promise
    wait([promise], timeout=_WAIT_S)
    return promise


def _fulfil(promise: "Future[str]", path: str, call: Callable[[], str]) -> None:
    try:
        promise.set_result(call())
    except ConfigError as error:  # raised where the fingerprint is asked for
        promise.set_exception(error)
    except BaseException as error:  # noqa: BLE001 - whoever asks must not wait for ever
        promise.set_exception(ConfigError(f"The adapter at {path} was not read ({error!r})."))

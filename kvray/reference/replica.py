"""A reference engine in a process of its own, driven over pipes; it never outlives its parent."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from kvray.errors import KVRayError
from kvray.reference.child_process import Child
from kvray.reference.output import Prompt, batch_of

CHILD_MODULE = "kvray.reference.replica_child"
_START_TIMEOUT_S = 300.0
_SEND_TIMEOUT_S = 30.0
_CANCEL_TIMEOUT_S = 5.0
_TURN_TIMEOUT_S = 0.5
_CLOSE_TIMEOUT_S = 15.0
_TERM_TIMEOUT_S = 3.0


class Replica:
    """The parent's handle on an engine process.

    Its calls come one after the other, from whatever threads. Errors quote the end of what the
    child printed when it dies.
    """

    def __init__(
        self,
        name: str,
        *,
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        module: str = CHILD_MODULE,
        **engine_options: Any,
    ) -> None:
        """Begin to start an engine; `wait_ready` ends it. So several can load at once.

        Args:
            name: appears in errors.
            env: variables of the child besides those of this process.
            log_path: receives the child's stdout and stderr; None: a temporary file.
            module: the child runs it; it may drive another engine over the same pipe.
            engine_options: arguments of `ReferenceEngine`.
        """
        self.name = name
        self._log: IO[bytes] = (
            log_path.open("a+b") if log_path else tempfile.TemporaryFile()  # noqa: SIM115
        )
        try:
            self._child = Child(f"Replica {name}", module, output=self._log, env=env)
        except BaseException:
            self._log.close()
            raise
        self._turn = threading.Lock()  # held for a call
        self._is_ready = False
        try:
            self._child.send(("start", engine_options), timeout_s=_SEND_TIMEOUT_S)
        except KVRayError:
            self.kill()
            raise

    @classmethod
    def start(
        cls, name: str, *, start_timeout_s: float = _START_TIMEOUT_S, **options: Any
    ) -> Replica:
        """Start an engine, and return when it is ready; KVRayError if it fails."""
        replica = cls(name, **options)
        try:
            replica.wait_ready(start_timeout_s)
        except BaseException:
            replica.kill()
            raise
        return replica

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @property
    def is_alive(self) -> bool:
        return self._child.process.poll() is None

    def wait_ready(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Return when the engine is up, or raise the error that stopped it; a late one is ended."""
        with self._turn:
            self._await_ready(timeout_s)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = 16,
        salt: str | None = None,
        timeout_s: float = 600.0,
    ) -> Any:
        """Do what `ReferenceEngine.generate` does, in the child.

        A KVRayError is the child's own, its death, or no answer in time. Late requests are
        cancelled, and a child that does not heed that is killed.
        """
        batch, is_single = batch_of(prompts)
        asked = {"max_tokens": max_tokens, "salt": salt, "timeout_s": timeout_s}
        with self._turn:
            self._await_ready(_START_TIMEOUT_S)
            message = ("generate", {"prompts": batch, **asked})
            self._child.send(message, timeout_s=_SEND_TIMEOUT_S)
            outputs = self._child.receive(timeout_s=timeout_s + _CANCEL_TIMEOUT_S)
        return outputs[0] if is_single else outputs

    def close(self) -> None:
        """Let the engine end on its own, and make sure that it does; an open call fails."""
        if not self._is_ready:
            self._child.kill()
        if not self._turn.acquire(timeout=_TURN_TIMEOUT_S):
            self._child.kill()  # which ends the call of another thread
            self._turn.acquire()
        try:
            self._child.pipe.end()
            if self._child.wait(_CLOSE_TIMEOUT_S) is None:
                self._child.process.terminate()
                self._child.wait(_TERM_TIMEOUT_S)
            self._child.close()
            self._log.close()
        finally:
            self._turn.release()

    def kill(self) -> None:
        """End the process and those below it at once, as a crash would. Twice is fine."""
        self._child.kill()
        self.close()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _await_ready(self, timeout_s: float) -> None:
        if self._log.closed:
            raise KVRayError(f"{self._child.name} is closed.")
        if not self._is_ready:
            self._child.receive(timeout_s=timeout_s)
            self._is_ready = True

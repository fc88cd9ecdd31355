"""A reference engine in a process of its own, driven over pipes; it never outlives its parent."""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from kvray.errors import ConfigError, KVRayError
from kvray.reference.child_process import spawn_child
from kvray.reference.engine_options import encode_options
from kvray.reference.output import Output, Prompt
from kvray.reference.pipe import JsonPipe, PipeClosed

_CHILD_MODULE = "kvray.reference.replica_child"
_SEND_TIMEOUT_S = 30.0
_TURN_TIMEOUT_S = 0.5
_CLOSE_TIMEOUT_S = 20.0
_TERM_TIMEOUT_S = 3.0
_LOG_TAIL_BYTES = 2000


class Replica:
    """The parent's handle on an engine process. Make one with `start`.

    Calls from several threads take turns. What the child prints goes to `log_path`, or to a
    temporary file whose end is quoted when the child dies.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], pipe: JsonPipe, log: IO[bytes]):
        self.name = name
        self.start_s = 0.0
        self._process = process
        self._pipe = pipe
        self._log = log
        self._turn = threading.Lock()
        self._call_ids = itertools.count(1)

    @classmethod
    def start(
        cls,
        name: str,
        *,
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        start_timeout_s: float = 300.0,
        **engine_options: Any,
    ) -> Replica:
        """Start an engine in a new process and return when it is ready to answer.

        Args:
            name: appears in errors.
            env: variables of the child besides those of this process.
            log_path: where the child's stdout and stderr go.
            start_timeout_s: the time the child has to load its model.
            engine_options: arguments of `ReferenceEngine`.

        Raises:
            KVRayError: the engine did not start; the message is the child's own.
        """
        started = time.monotonic()
        replica = cls.spawn(name, env=env, log_path=log_path, **engine_options)
        try:
            replica.wait_ready(start_timeout_s)
        except BaseException:
            replica.kill()
            raise
        replica.start_s = time.monotonic() - started
        return replica

    @classmethod
    def spawn(
        cls,
        name: str,
        *,
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        **engine_options: Any,
    ) -> Replica:
        """Begin to start an engine; `wait_ready` ends it. So several can load at once."""
        log = _open_log(log_path)
        try:
            process, pipe = spawn_child(_CHILD_MODULE, output=log, env=env)
        except BaseException:
            log.close()
            raise
        replica = cls(name, process, pipe, log)
        try:
            replica._pipe.send(encode_options(engine_options), timeout_s=_SEND_TIMEOUT_S)
        except PipeClosed as error:
            replica.kill()
            raise KVRayError(f"Replica {name} died as it was started.") from error
        return replica

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the child runs."""
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Return when the engine is up, or raise what kept it from it."""
        with self._turn:
            self._receive(0, timeout_s)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = 16,
        salt: str | None = None,
        timeout_s: float = 600.0,
    ) -> Any:
        """Do what `ReferenceEngine.generate` does, in the child.

        Raises:
            KVRayError: the child's own error, its death, or no answer in time (then it is
                killed: the next call would wait for this one).
        """
        request = {
            "prompts": prompts if isinstance(prompts, str) else [_plain(item) for item in prompts],
            "max_tokens": max_tokens,
            "salt": salt,
            "timeout_s": timeout_s,
        }
        with self._turn:
            call_id = next(self._call_ids)
            try:
                self._pipe.send({"id": call_id, "call": request}, timeout_s=_SEND_TIMEOUT_S)
            except PipeClosed as error:
                raise self._death(str(error)) from error
            outputs = self._receive(call_id, timeout_s + _SEND_TIMEOUT_S)["outputs"]
        made = [Output(**{**item, "token_ids": tuple(item["token_ids"])}) for item in outputs[1]]
        return made[0] if outputs[0] else made

    def close(self) -> None:
        """Let the engine end on its own, and make sure that it does. Twice is fine.

        A call that another thread is waiting in fails.
        """
        if not self._turn.acquire(timeout=_TURN_TIMEOUT_S):
            self._process.kill()
            self._turn.acquire()
        try:
            self._pipe.close()
            self._end(_CLOSE_TIMEOUT_S)
        finally:
            self._turn.release()

    def kill(self) -> None:
        """End the process at once, as a crash would. Twice is fine."""
        if self.is_alive:
            self._process.kill()
        self.close()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, call_id: int, timeout_s: float) -> dict[str, Any]:
        """Return the answer to a call; those to calls that were interrupted are dropped."""
        try:
            answer = self._pipe.receive(timeout_s=timeout_s)
            while answer["id"] != call_id:
                answer = self._pipe.receive(timeout_s=timeout_s)
        except PipeClosed as error:
            raise self._death(str(error)) from error
        if "error" in answer:
            kind = ConfigError if answer["is_config"] else KVRayError
            raise kind(f"Replica {self.name}: {answer['error']}")
        return answer

    def _death(self, reason: str) -> KVRayError:
        if self._log.closed:
            return KVRayError(f"Replica {self.name} is closed.")
        try:
            code = str(self._process.wait(1.0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = "none, so it was killed"
        tail = self._log_tail()
        return KVRayError(
            f"Replica {self.name} is gone: {reason} Its exit status: {code}. "
            f"It last printed: {tail or 'nothing'}"
        )

    def _log_tail(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        offset = max(size - _LOG_TAIL_BYTES, 0)
        return (
            os.pread(self._log.fileno(), _LOG_TAIL_BYTES, offset).decode(errors="replace").strip()
        )

    def _end(self, timeout_s: float) -> None:
        for stop in (self._process.terminate, self._process.kill, None):
            try:
                self._process.wait(timeout_s)
                break
            except subprocess.TimeoutExpired:
                if stop is None:
                    raise KVRayError(
                        f"Replica {self.name} (pid {self.pid}) cannot be ended."
                    ) from None
                stop()
                timeout_s = _TERM_TIMEOUT_S
        self._log.close()


def _open_log(path: Path | None) -> IO[bytes]:
    return tempfile.TemporaryFile() if path is None else path.open("a+b")


def _plain(prompt: Any) -> Any:
    return prompt if isinstance(prompt, (int, str)) else list(prompt)

"""A reference engine in a process of its own, driven over pipes; it never outlives its parent."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import IO, Any

from kvray.errors import KVRayError
from kvray.reference.calls import Call, Calls, TokenListener
from kvray.reference.child_process import spawn_child
from kvray.reference.engine_options import encode_options
from kvray.reference.output import Prompt, batch_of
from kvray.reference.pipe import JsonPipe, PipeClosed

CHILD_MODULE = "kvray.reference.replica_child"
_SEND_TIMEOUT_S = 30.0
_CANCEL_TIMEOUT_S = 5.0
_TURN_TIMEOUT_S = 0.5
_CLOSE_TIMEOUT_S = 20.0
_TERM_TIMEOUT_S = 3.0
_LOG_TAIL_BYTES = 2000


class Replica:
    """The parent's handle on an engine process. Make one with `start`.

    Calls from any thread are in flight at once; `Calls` cross to a thread that reads the answers.
    What the child prints goes to `log_path`, or to a temporary file whose end is quoted when the
    child dies.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], pipe: JsonPipe, log: IO[bytes]):
        self.name = name
        self.start_s = 0.0
        self._process = process
        self._pipe = pipe
        self._log = log
        self._turn = threading.Lock()
        self._calls = Calls(name)
        self._reader = threading.Thread(target=self._read, name=f"kvray-{name}", daemon=True)
        self._reader.start()

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
        module: str = CHILD_MODULE,
        **engine_options: Any,
    ) -> Replica:
        """Begin to start an engine; `wait_ready` ends it. So several can load at once.

        `module` is what the child runs: another one may drive another engine over the same pipe.
        """
        log = _open_log(log_path)
        try:
            process, pipe = spawn_child(module, output=log, env=env)
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
        try:
            self._calls.ready.result(timeout_s)
        except FutureTimeoutError:
            self._process.kill()
            raise self._death(f"It was not ready within {timeout_s:.0f} s.") from None

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
            KVRayError: the child's own error, its death, or no answer in time (then it is told
                to give the call up, and killed if it does not even do that).
        """
        batch, is_single = batch_of(prompts)
        deadline = time.monotonic() + timeout_s
        calls: list[Call] = []
        try:
            for prompt in batch:
                calls.append(self.submit(prompt, max_tokens=max_tokens, salt=salt))
            outputs = [call.future.result(max(deadline - time.monotonic(), 0)) for call in calls]
        except FutureTimeoutError:
            self._give_up(calls)
            raise KVRayError(
                f"Replica {self.name}: a request has not ended within {timeout_s:.0f} s."
            ) from None
        except KVRayError:
            for call in calls:
                self.cancel(call)
            raise
        return outputs[0] if is_single else outputs

    def submit(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 16,
        salt: str | None = None,
        listener: TokenListener | None = None,
    ) -> Call:
        """Send one prompt and return at once.

        Args:
            prompt: text or token ids.
            max_tokens: the longest answer.
            salt: keeps its blocks from those with another salt.
            listener: hears of the answer's tokens as they come.

        Raises:
            KVRayError: the child is gone; whatever else goes wrong is the future's.
        """
        call = self._calls.begin(listener)
        if call is None:
            raise self._death("It was not there any more.")
        asked = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "salt": salt,
            "is_stream": listener is not None,
        }
        try:
            self._send({"id": call.call_id, "call": asked})
        except BaseException:
            self._calls.forget(call)
            raise
        return call

    def cancel(self, call: Call) -> None:
        """Have the engine end a call early; its output is what it has so far, if it is not done."""
        if self._calls.is_open(call):
            with contextlib.suppress(KVRayError):
                self._send({"id": call.call_id})

    def close(self) -> None:
        """Let the engine end on its own, and make sure that it does. Twice is fine.

        Calls under way fail.
        """
        is_turn = self._turn.acquire(timeout=_TURN_TIMEOUT_S)
        if not is_turn:
            self._process.kill()
            self._turn.acquire()
        try:
            self._pipe.end()
        finally:
            self._turn.release()
        self._wait_for_end(_CLOSE_TIMEOUT_S)
        self._reader.join(_TERM_TIMEOUT_S)
        self._pipe.close()
        self._log.close()

    def kill(self) -> None:
        """End the process at once, as a crash would. Twice is fine."""
        if self.is_alive:
            self._process.kill()
        self.close()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: dict[str, Any]) -> None:
        with self._turn:
            try:
                self._pipe.send(message, timeout_s=_SEND_TIMEOUT_S)
            except PipeClosed as error:
                raise self._death(str(error)) from error

    def _give_up(self, calls: list[Call]) -> None:
        """Cancel calls; a child that does not answer to that would not answer the next ones."""
        for call in calls:
            self.cancel(call)
        try:
            for call in calls:
                call.future.exception(_CANCEL_TIMEOUT_S)
        except FutureTimeoutError:
            self._process.kill()

    def _read(self) -> None:
        """Hand answers on until the child is gone; then fail whatever waits for one."""
        try:
            while True:
                self._calls.settle(self._pipe.receive(timeout_s=None))
        except PipeClosed as error:
            reason = str(error)
        self._calls.end(lambda: self._death(reason))

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

    def _wait_for_end(self, timeout_s: float) -> None:
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


def _open_log(path: Path | None) -> IO[bytes]:
    return tempfile.TemporaryFile() if path is None else path.open("a+b")

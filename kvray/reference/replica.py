"""A reference engine in a process of its own, driven over pipes; it never outlives its parent."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import IO, Any, cast

import psutil

from kvray.errors import ConfigError, KVRayError
from kvray.reference.child_process import Pipe, PipeClosed, spawn_child
from kvray.reference.output import Call, Listener, Output, Prompt, batch_of

CHILD_MODULE = "kvray.reference.replica_child"
_READY_ID = 0
"""A child says under this id that it is up, or why not."""
_SEND_TIMEOUT_S = 30.0
_CANCEL_TIMEOUT_S = 5.0
_TURN_TIMEOUT_S = 0.5
_CLOSE_TIMEOUT_S = 20.0
_TERM_TIMEOUT_S = 3.0
_LOG_TAIL_BYTES = 2000


class Replica:
    """The parent's handle on an engine process. Make one with `start`.

    Calls from any thread are in flight at once. Callers' threads begin calls, and one thread that
    reads the pipe ends them. The child prints to `log_path`, or to a temporary file; errors quote
    its end when the child dies.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], pipe: Pipe, log: IO[bytes]):
        self.name = name
        self._process = process
        self._pipe = pipe
        self._log = log
        self._turn = threading.Lock()  # held to send
        self._lock = threading.Lock()  # held to change the calls
        self._ids = itertools.count(_READY_ID + 1)
        self._ready = Call(call_id=_READY_ID)
        self.event_metadata: dict[str, Any] | None = None
        """Where its KV events are published, once it is ready; None: nowhere."""
        self._calls = {_READY_ID: self._ready}
        self._is_over = False
        self._reader = threading.Thread(target=self._read, name=f"kvray-{name}", daemon=True)
        self._reader.start()

    @classmethod
    def start(cls, name: str, *, start_timeout_s: float = 300.0, **options: Any) -> Replica:
        """Start an engine as `spawn` does, and return when it is ready; KVRayError if it fails."""
        replica = cls.spawn(name, **options)
        try:
            replica.wait_ready(start_timeout_s)
        except BaseException:
            replica.kill()
            raise
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

        Args:
            name: appears in errors.
            env: variables of the child besides those of this process.
            log_path: receives the child's stdout and stderr.
            module: the child runs it; it may drive another engine over the same pipe.
            engine_options: arguments of `ReferenceEngine`; and `event_host`, an address of this
                node on which the engine's KV events are published.
        """
        log = _open_log(log_path)
        try:
            process, pipe = spawn_child(module, output=log, env=env)
        except BaseException:
            log.close()
            raise
        replica = cls(name, process, pipe, log)
        try:
            replica._pipe.send(engine_options, timeout_s=_SEND_TIMEOUT_S)
        except PipeClosed as error:
            replica.kill()
            raise KVRayError(f"Replica {name} died as it was started.") from error
        return replica

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Return when the engine is up, or raise the error that stopped it."""
        try:
            self._ready.future.result(timeout_s)
        except FutureTimeoutError:
            self._process.kill()
            raise self._death(f"It was not ready within {timeout_s:.0f} s.") from None

    def wait_end(self) -> None:
        """Return when the child is gone, however it ended, and every call with it."""
        self._reader.join()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = 16,
        salt: str | None = None,
        timeout_s: float = 600.0,
    ) -> Any:
        """Do what `ReferenceEngine.generate` does, in the child.

        A KVRayError is the child's own, its death, or no answer in time. A late call is
        cancelled, and a child that does not heed that is killed.
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
        listener: Listener | None = None,
        **more: str,
    ) -> Call:
        """Do what `ReferenceEngine.submit` does, in the child.

        `more` is for the engine of another module. KVRayError if the child is gone; the call's
        future has every other error.
        """
        call = Call(call_id=next(self._ids), listener=listener)
        with self._lock:
            if not self._is_over:
                self._calls[call.call_id] = call
        if call.call_id not in self._calls:
            raise self._death("It had ended before.")
        asked = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "salt": salt,
            "is_stream": listener is not None,
            **more,
        }
        try:
            self._send({"id": call.call_id, "call": asked})
        except BaseException:
            self._pop(call.call_id)
            raise
        return call

    def cancel(self, call: Call) -> None:
        """End a call early; its output is what the engine has so far."""
        if call.call_id in self._calls:
            with contextlib.suppress(KVRayError):
                self._send({"id": call.call_id})

    def close(self) -> None:
        """Let the engine end on its own, and make sure that it does; open calls fail."""
        if not self._turn.acquire(timeout=_TURN_TIMEOUT_S):
            self._process.kill()  # which ends the send that another thread is stuck in
            self._turn.acquire()
        self._pipe.end()
        self._turn.release()
        self._wait_for_end(_CLOSE_TIMEOUT_S)
        self._reader.join(_TERM_TIMEOUT_S)
        self._pipe.close()
        self._log.close()

    def kill(self) -> None:
        """End the process and those below it at once, as a crash would. Twice is fine."""
        if self.is_alive:
            below = _below(self.pid)
            self._process.kill()
            for process in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
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
        """Hand answers on until the child is gone; then fail every open call."""
        try:
            while True:
                self._settle(self._pipe.receive(timeout_s=None))
        except PipeClosed as error:
            reason = str(error)
        with self._lock:
            self._is_over = True
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.future.set_exception(self._death(reason))

    def _settle(self, answer: dict[str, Any]) -> None:
        if "tokens" in answer:
            call = self._calls.get(answer["id"])
            if call is not None and call.listener is not None:
                call.listener(answer["tokens"])
        elif (call := self._pop(answer["id"])) is not None:
            if "error" in answer:
                kind = ConfigError if answer["is_config"] else KVRayError
                call.future.set_exception(kind(f"Replica {self.name}: {answer['error']}"))
            else:
                # A child that reports that it is up sends no output.
                self.event_metadata = answer.get("events", self.event_metadata)
                call.future.set_result(cast("Output", answer.get("output")))

    def _pop(self, call_id: int) -> Call | None:
        with self._lock:
            return self._calls.pop(call_id, None)

    def _death(self, reason: str) -> KVRayError:
        if self._log.closed:
            return KVRayError(f"Replica {self.name} is closed.")
        try:
            code = str(self._process.wait(1.0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = "none, so it was killed"
        log = self._log.fileno()
        offset = max(os.fstat(log).st_size - _LOG_TAIL_BYTES, 0)
        tail = os.pread(log, _LOG_TAIL_BYTES, offset).decode(errors="replace").strip()
        return KVRayError(
            f"Replica {self.name} is gone: {reason} Its exit status: {code}. "
            f"It last printed: {tail or 'nothing'}"
        )

    def _wait_for_end(self, timeout_s: float) -> None:
        for stop in (self._process.terminate, self._process.kill, None):
            try:
                self._process.wait(timeout_s)
                return
            except subprocess.TimeoutExpired:
                timeout_s = _TERM_TIMEOUT_S
                if stop is not None:
                    stop()
        raise KVRayError(f"Replica {self.name} (pid {self.pid}) cannot be ended.")


def _below(pid: int) -> list[psutil.Process]:
    """Return the processes that a process has started; not all of them end with it.

    Python's resource trackers are left out: they remove what the others had in shared memory.
    """
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if not any("resource_tracker" in word for word in process.cmdline()):
                    found.append(process)
    return found


def _open_log(path: Path | None) -> IO[bytes]:
    return tempfile.TemporaryFile() if path is None else path.open("a+b")

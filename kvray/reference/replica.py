"""A reference engine in a process of its own, driven over pipes; it never outlives its parent."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from pathlib import Path
from typing import IO, Any, cast

from kvray.errors import KVRayError
from kvray.reference.child_process import Child, PipeClosed
from kvray.reference.output import READY_ID, Call, Listener, Output, Prompt, batch_of

CHILD_MODULE = "kvray.reference.replica_child"
_SEND_TIMEOUT_S = 30.0
_CANCEL_TIMEOUT_S = 5.0
_TURN_TIMEOUT_S = 0.5
_CLOSE_TIMEOUT_S = 20.0
_TERM_TIMEOUT_S = 3.0


class Replica:
    """The parent's handle on an engine process.

    Calls from any thread are in flight at once. Callers' threads begin calls, and one thread that
    reads the pipe ends them. Errors quote the end of what the child printed when it dies.
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
            engine_options: arguments of `ReferenceEngine`; and `event_host`, an address of this
                node on which the engine's KV events are published.
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
        self._turn = threading.Lock()  # held to send
        self._ids = itertools.count(READY_ID + 1)
        self._ready = Call(call_id=READY_ID)
        self.event_metadata: dict[str, Any] | None = None
        """Where its KV events are published, once it is ready; None: nowhere."""
        self._calls = {READY_ID: self._ready}
        self._is_over = False
        self._reader = threading.Thread(target=self._read, name=f"kvray-{name}", daemon=True)
        self._reader.start()
        try:
            self._send(engine_options)
        except KVRayError:
            self.kill()
            raise

    @classmethod
    def start(cls, name: str, *, start_timeout_s: float = 300.0, **options: Any) -> Replica:
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

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Return when the engine is up, or raise the error that stopped it."""
        try:
            self._ready.future.result(timeout_s)
        except FutureTimeoutError:
            self._child.kill()
            raise KVRayError(
                f"{self._child.name} was not ready within {timeout_s:.0f} s, and is killed."
            ) from None

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
        except (KVRayError, FutureTimeoutError) as error:
            for call in calls:
                self.cancel(call)
            if isinstance(error, KVRayError):
                raise
            # A child that does not answer to that would not answer the next ones.
            if wait([call.future for call in calls], _CANCEL_TIMEOUT_S).not_done:
                self._child.kill()
            raise KVRayError(
                f"Replica {self.name}: a request has not ended within {timeout_s:.0f} s."
            ) from None
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
        self._calls[call.call_id] = call
        # The reader says that it is over before it fails what is open: nothing is left behind.
        if self._is_over and self._calls.pop(call.call_id, None) is not None:
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
            self._calls.pop(call.call_id, None)
            raise
        return call

    def cancel(self, call: Call) -> None:
        """End a call early; its output is what the engine has so far."""
        if call.call_id in self._calls:
            with contextlib.suppress(KVRayError):
                self._send({"id": call.call_id})

    def close(self) -> None:
        """Let the engine end on its own, and make sure that it does; open calls fail."""
        if not self._ready.future.done():
            self._child.kill()
        if not self._turn.acquire(timeout=_TURN_TIMEOUT_S):
            self._child.kill()  # which ends the send that another thread is stuck in
            self._turn.acquire()
        self._child.pipe.end()
        self._turn.release()
        if self._child.wait(_CLOSE_TIMEOUT_S) is None:
            self._child.process.terminate()
            self._child.wait(_TERM_TIMEOUT_S)
        self._child.kill()
        self._reader.join(_TERM_TIMEOUT_S)
        self._child.close()
        self._log.close()

    def kill(self) -> None:
        """End the process and those below it at once, as a crash would. Twice is fine."""
        self._child.kill()
        self.close()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: dict[str, Any]) -> None:
        with self._turn:
            try:
                self._child.pipe.send(message, timeout_s=_SEND_TIMEOUT_S)
            except PipeClosed as error:
                raise self._death(str(error)) from error

    def _read(self) -> None:
        """Hand answers on until the child is gone; then fail every open call."""
        try:
            while True:
                self._settle(self._child.pipe.receive(timeout_s=None))
        except PipeClosed as error:
            reason = str(error)
        self._is_over = True
        while self._calls:
            with contextlib.suppress(KeyError):  # its caller took the last one back
                self._calls.popitem()[1].future.set_exception(self._death(reason))

    def _settle(self, answer: dict[str, Any]) -> None:
        if "tokens" in answer:
            call = self._calls.get(answer["id"])
            if call is not None and call.listener is not None:
                call.listener(answer["tokens"])
        elif (call := self._calls.pop(answer["id"], None)) is not None:
            if (error := answer.get("error")) is not None:
                call.future.set_exception(type(error)(f"{self._child.name}: {error}"))
            else:
                # A child that reports that it is up sends no output.
                self.event_metadata = answer.get("events", self.event_metadata)
                call.future.set_result(cast("Output", answer.get("output")))

    def _death(self, reason: str) -> KVRayError:
        if self._log.closed:
            return KVRayError(f"{self._child.name} is closed.")
        return self._child.death(reason)

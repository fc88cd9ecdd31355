"""The calls that a replica is answering: what its child says, handed to whoever waits for it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvray.errors import ConfigError, KVRayError
from kvray.reference.output import Output

TokenListener: TypeAlias = "Callable[[list[int]], None]"
"""Called with an answer's new tokens on the replica's thread: it must neither wait nor raise."""

READY_ID = 0
"""The id under which a child says that it is up, or why not."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A prompt that is being answered; its tokens are heard of before its future is resolved."""

    call_id: int
    listener: TokenListener | None
    future: Future[Output] = field(default_factory=Future)


class Calls:
    """Calls by their ids; callers' threads begin them, the one that reads the pipe ends them."""

    def __init__(self, name: str) -> None:
        """Have none; `name` stands in errors."""
        self.ready: Future[None] = _unbreakable(Future())
        self._name = name
        self._lock = threading.Lock()
        self._ids = itertools.count(READY_ID + 1)
        self._calls: dict[int, Call] = {}
        self._is_over = False

    def begin(self, listener: TokenListener | None) -> Call | None:
        """Return a new call; None when there will be no more answers."""
        call = Call(call_id=next(self._ids), listener=listener)
        _unbreakable(call.future)
        with self._lock:
            if self._is_over:
                return None
            self._calls[call.call_id] = call
        return call

    def forget(self, call: Call) -> None:
        """Drop a call that did not reach the child."""
        self._pop(call.call_id)

    def is_open(self, call: Call) -> bool:
        """Whether its answer has not ended."""
        with self._lock:
            return call.call_id in self._calls

    def settle(self, answer: dict[str, Any]) -> None:
        """Hand one message of the child on."""
        call_id = answer["id"]
        if "tokens" in answer:
            hearing = self._calls.get(call_id)
            if hearing is not None and hearing.listener is not None:
                hearing.listener(answer["tokens"])
            return
        if call_id == READY_ID:
            self._resolve(self.ready, answer)
        elif (call := self._pop(call_id)) is not None:
            self._resolve(call.future, answer)

    def end(self, make_error: Callable[[], KVRayError]) -> None:
        """Fail all that wait for an answer; there will be none."""
        with self._lock:
            self._is_over = True
            calls, self._calls = list(self._calls.values()), {}
        futures: list[Future[Any]] = [call.future for call in calls]
        if not self.ready.done():
            futures.append(self.ready)
        for future in futures:
            future.set_exception(make_error())

    def _resolve(self, future: Future[Any], answer: dict[str, Any]) -> None:
        if "error" in answer:
            kind = ConfigError if answer["is_config"] else KVRayError
            future.set_exception(kind(f"Replica {self._name}: {answer['error']}"))
        else:
            future.set_result(_output(answer["output"]) if "output" in answer else None)

    def _pop(self, call_id: int) -> Call | None:
        with self._lock:
            return self._calls.pop(call_id, None)


def _unbreakable(future: Future[Any]) -> Future[Any]:
    """Return a future that nobody but its answer ends: `cancel` on it does nothing."""
    future.set_running_or_notify_cancel()
    return future


def _output(plain: dict[str, Any]) -> Output:
    return Output(**{**plain, "token_ids": tuple(plain["token_ids"])})

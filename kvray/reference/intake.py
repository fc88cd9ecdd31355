"""Where an executor gets its requests, and where it hands their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvray.errors import KVRayError
from kvray.reference.request import LlmRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the executor is told at the head of an iteration."""

    submitted: list[LlmRequest] = field(default_factory=list)
    cancelled: frozenset[int] = frozenset()
    is_stop: bool = False
    is_dummy_due: bool = False
    """Whether others have work and this rank has none: it runs a dummy beside them."""


class Intake(Protocol):
    """The executor's side: called at the head of each iteration, and as requests end."""

    def take(self, *, has_work: bool) -> Orders:
        """Return what is new; with nothing to do on any rank, sleep until there is something."""
        ...

    def pause(self, timeout_s: float) -> None:
        """Sleep until something comes in, at most so long."""
        ...

    def progress(self, requests: Iterable[LlmRequest]) -> None:
        """Tell who listens which tokens requests that go on have by now."""
        ...

    def resolve(self, request: LlmRequest) -> None:
        """Hand an ended request back."""
        ...

    def fail(self, request: LlmRequest, error: KVRayError) -> None:
        """Hand the reason back why a request has no answer."""
        ...

    def close(self, make_error: Callable[[], KVRayError]) -> None:
        """Take nothing more, and fail whatever has not ended."""
        ...

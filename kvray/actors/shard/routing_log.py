"""The notes of routers on the requests that they sent to a node's replicas."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvray.errors import ConfigError
from kvray.trace.request_note import RequestNote
from kvray.trace.routing_note import ROUTING_NOTES_MAX, RoutingNote, unpack_routing

_BYTES_MAX = 8 * 2**20
"""Of all notes; one of 16 candidates has some 1.5 KiB."""
_OVERHEAD = 400  # bytes that keeping one takes beside its own
_LATER_S, _EARLIER_S = 300.0, 5.0
"""An engine may see a request so long after it was sent there, and so much earlier by its clock."""

_Prompt = tuple[str, int]
"""A replica, and the tokens of a prompt that it got."""


class _Kept(NamedTuple):
    prompt: _Prompt
    at: float
    prefix_digest: bytes
    packed: bytes


class RoutingLog:
    """The latest requests that routers sent to a node's replicas; state of the shard's event loop.

    A router does not know the engine's number of a request. So an engine's note finds the router's
    by replica, prompt and time: of equal prompts at about the same time it may find the other's.
    """

    def __init__(self, bytes_max: int = _BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._num_bytes = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._of: dict[_Prompt, dict[str, None]] = {}
        """The requests with a prompt, the oldest first."""

    def note(self, notes: Sequence[Any]) -> None:
        """Take notes of a router; a later one of the same request takes the place of the first.

        ConfigError: a note is not valid; nothing was taken.
        """
        if not isinstance(notes, list | tuple) or len(notes) > ROUTING_NOTES_MAX:
            raise ConfigError(f"Notes of a router are a list of at most {ROUTING_NOTES_MAX}.")
        for note, packed in [(unpack_routing(packed), packed) for packed in notes]:
            self._forget(note.request)
            prompt = note.replica, note.num_tokens
            self._kept[note.request] = _Kept(prompt, note.at, note.prefix_digest, packed)
            self._of.setdefault(prompt, {})[note.request] = None
            self._num_bytes += _OVERHEAD + len(packed)
        while self._num_bytes > self._bytes_max:
            self._forget(next(iter(self._kept)))

    def find(self, replica: str, asked: RequestNote) -> RoutingNote | None:
        """Return the note on the request that `replica` has noted as `asked`, if there is one."""
        near = [
            (abs(asked.at - kept.at), kept.packed)
            for kept in map(self._kept.__getitem__, self._of.get((replica, asked.num_tokens), ()))
            if -_EARLIER_S <= asked.at - kept.at <= _LATER_S
            and kept.prefix_digest in (b"", asked.prefix_digest)
        ]
        return unpack_routing(min(near)[1]) if near else None

    def _forget(self, request: str) -> None:
        kept = self._kept.pop(request, None)
        if kept is None:
            return
        self._num_bytes -= _OVERHEAD + len(kept.packed)
        same = self._of[kept.prompt]
        del same[request]
        if not same:
            del self._of[kept.prompt]

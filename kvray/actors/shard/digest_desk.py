"""The shard's desk for prefix digests: engines note them, and the lookup compares them all."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from kvray.actors.lookup.stored_digests import Finding, Note, Origin, StoredDigests
from kvray.actors.staging.wire_values import Count, checked
from kvray.errors import ConfigError
from kvray.identity.block import Namespace
from kvray.trace.prefix_digest import NOTES_MAX, PREFIX_DIGEST_BYTES

_PENDING_MAX = 8192
_SENT_MAX = 2048  # notes in one announcement, beside those that are told again
_NAMESPACES_MAX = 16
_DIGESTS_MAX = 4096
_RANKS_MAX = 4096
_ANSWERS_MAX = 8  # answers in one reply; a namespace is tens of kilobytes at most
_INCOMPATIBLE_MAX = 4096

_Digest = Annotated[
    bytes, Field(strict=True, min_length=PREFIX_DIGEST_BYTES, max_length=PREFIX_DIGEST_BYTES)
]
_NOTE: TypeAdapter[tuple[bytes, int]] = TypeAdapter(tuple[_Digest, Count])


class DigestDesk:
    """Keeps notes until the lookup has them, and its findings until the engine asks for them.

    State of the shard's event loop; `due` alone may run in another thread while notes come in.
    """

    def __init__(self) -> None:
        self.stored: frozenset[int] = frozenset()
        """Namespaces, as arenas number them, that the lookup knows stored digests of."""
        self._pending: list[Note] = []
        self._sent: list[Note] = []
        self._told = StoredDigests(namespaces_max=_NAMESPACES_MAX, digests_max=_DIGESTS_MAX)
        self._findings: OrderedDict[tuple[str, int], dict[Namespace, Finding]] = OrderedDict()
        self._incompatible: OrderedDict[tuple[str, int, bytes], Finding] = OrderedDict()
        """Replica, rank, digest -> the latest finding, for people."""

    def note(self, origin: Origin, notes: Sequence[Any]) -> int:
        """Take an engine's notes, each (digest, missed tokens or 0); those beyond the limit go.

        Returns how many are not valid, and were not taken. ConfigError: they are no notes at all.
        """
        if not isinstance(notes, list | tuple) or len(notes) > NOTES_MAX:
            raise ConfigError(f"Notes on digests are a list of at most {NOTES_MAX}.")
        found = []
        for note in notes:
            with contextlib.suppress(ConfigError):
                found.append(checked(_NOTE, note, "note on a digest"))
        taken = found[: _PENDING_MAX - len(self._pending)]
        self._pending.extend((origin, digest, tokens) for digest, tokens in taken)
        return len(notes) - len(found)

    def due(self, *, full: bool) -> list[Note]:
        """Return what to tell the lookup now, and all that it was told before if `full`."""
        self._sent = self._pending[:_SENT_MAX]
        return [*self._told.notes(), *self._sent] if full else self._sent

    def settle(self, findings: list[Finding]) -> None:
        """The lookup has taken what was `due` last, and answered."""
        for note in self._sent:
            if note[2] == 0:
                self._told.add(note)
        del self._pending[: len(self._sent)]
        self._sent = []
        for finding in findings:
            self._keep(finding)

    def hear(self, stored: Iterable[int]) -> None:
        """Take what the lookup says is stored; nothing, if it has just started or is older."""
        self.stored = frozenset(stored) or self.stored

    def answers(self, replica: str, rank: int) -> list[dict[str, Any]]:
        """Return, once, what was found for a rank, one mapping a namespace.

        `num_tokens` were missed whose digests `replica` has stored, in a namespace that has the
        `difference` (field -> [the rank's value, its value]).
        """
        kept = self._findings.get((replica, rank), {})
        answered = [kept.pop(namespace) for namespace in list(kept)[:_ANSWERS_MAX]]
        if not kept:
            self._findings.pop((replica, rank), None)
        return [
            {
                "num_tokens": finding.num_tokens,
                "replica": finding.replica,
                "difference": finding.origin.namespace.difference(finding.namespace),
            }
            for finding in answered
        ]

    def incompatible(self, replica: str, rank: int, digest: bytes) -> Finding | None:
        """Return what was found for the misses of a rank with this digest."""
        return self._incompatible.get((replica, rank, digest))

    def _keep(self, finding: Finding) -> None:
        origin = finding.origin
        self._incompatible[origin.replica, origin.rank, finding.prefix_digest] = finding
        if len(self._incompatible) > _INCOMPATIBLE_MAX:
            self._incompatible.popitem(last=False)
        kept = self._findings.setdefault((origin.replica, origin.rank), {})
        before = kept.get(finding.namespace)
        num_tokens = finding.num_tokens + (before.num_tokens if before else 0)
        kept[finding.namespace] = replace(finding, num_tokens=num_tokens)
        if len(self._findings) > _RANKS_MAX:
            self._findings.popitem(last=False)

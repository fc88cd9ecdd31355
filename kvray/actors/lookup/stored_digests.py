"""Prompt-prefix digests that were stored, by namespace: tells `incompatible` from never stored."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvray.identity.block import Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The rank that noted a prefix digest."""

    replica: str
    rank: int
    namespace: Namespace


Note = tuple[Origin, bytes, int]
"""The rank, the digest, and how many tokens were missed with it; 0: it was stored.

A plain tuple: a full announcement has tens of thousands.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """A miss of `origin` whose digest is stored in another namespace only."""

    origin: Origin
    num_tokens: int
    replica: str
    """The one that stored it."""
    namespace: Namespace
    """Where it is stored: of several the one that differs in the fewest fields."""
    prefix_digest: bytes


class StoredDigests:
    """Bounded memory of what was stored; of too much the longest unheard of goes.

    What is in it was stored once and may be evicted since: had the namespaces been one, the miss
    might have been one all the same.
    """

    def __init__(self, *, namespaces_max: int, digests_max: int) -> None:
        """Have room for `digests_max` digests in each of `namespaces_max`."""
        self._namespaces_max = namespaces_max
        self._digests_max = digests_max
        # Namespace -> digest -> the replica that stored it last.
        self._stored: OrderedDict[Namespace, OrderedDict[bytes, str]] = OrderedDict()

    def __len__(self) -> int:
        """Return how many digests are remembered, in all namespaces together."""
        return sum(len(digests) for digests in self._stored.values())

    def take(self, notes: Iterable[Note]) -> list[Finding]:
        """Enter what was stored and return what of the misses is stored elsewhere.

        The order of `notes` counts: a replica stores what it has just missed.
        """
        findings = []
        for note in notes:
            origin, digest, num_tokens = note
            if num_tokens == 0:
                self.add(note)
            elif digest not in self._stored.get(origin.namespace, ()) and (
                elsewhere := self.elsewhere(origin.namespace, digest)
            ):
                namespace, replica = elsewhere
                findings.append(Finding(origin, num_tokens, replica, namespace, digest))
        return findings

    def add(self, note: Note) -> None:
        """Enter a digest that was stored."""
        origin, digest, _ = note
        digests = self._stored.setdefault(origin.namespace, OrderedDict())
        self._stored.move_to_end(origin.namespace)
        digests[digest] = origin.replica
        digests.move_to_end(digest)
        if len(digests) > self._digests_max:
            digests.popitem(last=False)
        if len(self._stored) > self._namespaces_max:
            self._stored.popitem(last=False)

    def elsewhere(self, namespace: Namespace, digest: bytes) -> tuple[Namespace, str] | None:
        """Return the most similar other namespace that stored `digest`, and its replica."""
        others = [
            (other, digests[digest])
            for other, digests in self._stored.items()
            if digest in digests and other != namespace
        ]
        return min(others, key=lambda other: len(namespace.difference(other[0])), default=None)

    def notes(self) -> Iterator[Note]:
        """Yield what, taken by an empty memory of the same size, makes it equal to this one."""
        for namespace, digests in self._stored.items():
            origins = {
                replica: Origin(replica=replica, rank=0, namespace=namespace)
                for replica in set(digests.values())
            }
            for digest, replica in digests.items():
                yield origins[replica], digest, 0

"""Prompt-prefix digests that were stored, by namespace: tells `incompatible` from never stored."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvray.identity.block import Namespace, namespace_id


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
    """Bounded memory of stored digests; it drops the one that is longest unheard of.

    A block may have left the tier since: even in one namespace the miss might have been one.
    """

    def __init__(self, *, namespaces_max: int, digests_max: int) -> None:
        self._namespaces_max = namespaces_max
        self._digests_max = digests_max
        # Namespace -> digest -> the replica that stored it last.
        self._stored: OrderedDict[Namespace, OrderedDict[bytes, str]] = OrderedDict()
        self._numbers: dict[Namespace, int] = {}

    def __len__(self) -> int:
        """Return the number of digests, in all namespaces together."""
        return sum(len(digests) for digests in self._stored.values())

    def numbers(self) -> tuple[int, ...]:
        """Return its namespaces as arenas number them."""
        return tuple(self._numbers.values())

    def take(self, notes: Iterable[Note]) -> list[Finding]:
        """Enter stored digests, and return the misses that another namespace has stored.

        The order of `notes` counts: a replica stores after its miss.
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
        if origin.namespace not in self._stored:
            self._numbers[origin.namespace] = namespace_id(origin.namespace.digest())
        digests = self._stored.setdefault(origin.namespace, OrderedDict())
        self._stored.move_to_end(origin.namespace)
        digests[digest] = origin.replica
        digests.move_to_end(digest)
        if len(digests) > self._digests_max:
            digests.popitem(last=False)
        if len(self._stored) > self._namespaces_max:
            dropped, _ = self._stored.popitem(last=False)
            del self._numbers[dropped]

    def elsewhere(self, namespace: Namespace, digest: bytes) -> tuple[Namespace, str] | None:
        """Return the most similar other namespace that stored `digest`, and its replica."""
        others = [
            (other, digests[digest])
            for other, digests in self._stored.items()
            if digest in digests and other != namespace
        ]
        return min(others, key=lambda other: len(namespace.difference(other[0])), default=None)

    def notes(self) -> Iterator[Note]:
        """Yield notes that give an empty memory of the same size the same content."""
        for namespace, digests in self._stored.items():
            origins = {
                replica: Origin(replica=replica, rank=0, namespace=namespace)
                for replica in set(digests.values())
            }
            for digest, replica in digests.items():
                yield origins[replica], digest, 0

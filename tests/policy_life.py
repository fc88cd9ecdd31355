"""A random life of a tier under a policy: prompts of a forest come, grow, and come again."""

import random
from collections.abc import Iterator

import numpy as np

from kvray.store.arena import eviction, lease, slots
from kvray.store.arena.layout import FREE, READY, Geometry
from kvray.store.arena.tables import Array, Tables
from kvray.store.policy import Policy, Use

BLOCK_BYTES = 4096
_PART, _HOLDER = 0, 0
_REQUEST = lease.PartRequest(_PART)
_PROMPT_MAX = 12
_FORKS = 3


class Tier:
    """Real tables and slots under a policy; it tells the policy which blocks leave."""

    def __init__(self, num_blocks: int, policy: Policy) -> None:
        capacity = num_blocks * BLOCK_BYTES
        geometry = Geometry(
            capacity=capacity, slab_bytes=capacity, slot_min=BLOCK_BYTES, holders_max=1
        )
        memory = bytearray(geometry.table_bytes)
        self.tables = Tables(memory, geometry, has_data=False)
        self.policy = policy

    def next_to_go(self, count: int, *, protect: Array, now: float) -> Array:
        """Return up to `count` slots to evict, in order."""
        return eviction.choose_victims(
            self.tables,
            count,
            within=np.arange(self.tables.geometry.num_slots),
            protect=protect,
            rank=lambda some: self.policy.rank(some, now=now),
        )

    def reserve(self, keys: Array, *, parent: Array | None, depth: int) -> slots.Reservation:
        """Reserve slots for those of `keys` that are missing; there is room for them."""
        made = slots.reserve(
            self.tables,
            keys,
            parent=parent,
            depth=depth,
            part=_PART,
            block_bytes=BLOCK_BYTES,
            holder=_HOLDER,
            candidates=slots.Candidates(),
        )
        assert made is not None
        return made


class Life:
    """A tier, and what has happened to it. Equal seeds are equal lives."""

    def __init__(self, policy: Policy, *, num_blocks: int = 64, seed: int = 0) -> None:
        self.tier = Tier(num_blocks, policy)
        self.policy = policy
        self.now = 0.0
        self.victims: list[int] = []
        """All that ever went, in order."""
        self.protected = np.empty(0, dtype=np.int64)
        """What the last victims had to spare."""
        self._rng = random.Random(seed)
        self._keys: dict[tuple[int, ...], Array] = {}
        self._paths: list[tuple[int, ...]] = []
        self._leases: list[lease.Lease] = []
        self._writing: list[slots.Reservation] = []

    def ready(self) -> Array:
        """Return the slots that have blocks."""
        return np.flatnonzero(self.tier.tables.slot_state == READY)

    def steps(self, count: int, *, with_others: bool = True) -> Iterator[Array]:
        """Make requests; yield the victims of each before they go.

        Args:
            count: of requests.
            with_others: whether somebody leases blocks and has some under way meanwhile.
        """
        for _ in range(count):
            self.now += self._rng.expovariate(0.2)
            if with_others:
                self._disturb()
            yield from self._request(self._next_path())

    def run(self, count: int, *, with_others: bool = True) -> None:
        """Make requests."""
        for _ in self.steps(count, with_others=with_others):
            pass

    def _request(self, path: tuple[int, ...]) -> Iterator[Array]:
        keys = self._keys_of(path)
        names = np.ascontiguousarray(keys[:, 0]).view(np.int64)
        found = self._find(keys)
        first, length = len(found), len(keys)
        tables = self.tier.tables
        tables.slot_tick[found] = tables.next_tick()
        if first:
            self.policy.used(Use(found, names[:first], 0, length, self.now))
        if first < length:
            self.protected = found
            short = length - first - np.count_nonzero(tables.slot_state == FREE)
            victims = found[:0]
            if short > 0:
                victims = self.tier.next_to_go(short, protect=found, now=self.now)[:short]
            yield victims
            self.victims += victims.tolist()
            slots.evict(tables, victims)
            parent = keys[first - 1 : first] if first else None
            made = self.tier.reserve(keys[first:], parent=parent, depth=first)
            slots.commit(tables, made, np.zeros(len(made.slots), dtype="<u8"))
            if len(made.slots):
                rows = first + made.rows
                before = int(found[-1]) if first else -1
                self.policy.stored(
                    Use(made.slots, names[rows], int(rows[0]), length, self.now, before)
                )

    def _find(self, keys: Array) -> Array:
        """Return the slots of the longest run of leading `keys`."""
        return lease.match(self.tier.tables, keys, [_REQUEST])[1][_REQUEST]

    def _next_path(self) -> tuple[int, ...]:
        """Return a prompt that goes on with another one, or shares its head, or is new."""
        rng = self._rng
        kind = rng.random()
        if not self._paths or kind < 0.3:
            path: tuple[int, ...] = (rng.randrange(10**9),)
        else:
            before = self._paths[-1 - min(int(rng.expovariate(0.1)), len(self._paths) - 1)]
            path = before if kind < 0.8 else before[: rng.randrange(len(before)) + 1]
        while len(path) < _PROMPT_MAX and rng.random() < 0.7:
            path += (rng.randrange(_FORKS),)
        self._paths = [*self._paths[-100:], path]
        return path

    def _keys_of(self, path: tuple[int, ...]) -> Array:
        """Return a key for each head of `path`, the same ones at any time."""
        if len(self._keys) > 5000:
            self._keys.clear()
        heads = [path[: end + 1] for end in range(len(path))]
        for head in heads:
            if head not in self._keys:
                words = random.Random(repr(head))
                made = [words.getrandbits(64) for _ in range(4)]
                self._keys[head] = np.array(made, dtype="<u8")
        return np.stack([self._keys[head] for head in heads])

    def _disturb(self) -> None:
        """Have somebody lease a prompt's head, or write a prompt that is not ready yet."""
        tables, rng = self.tier.tables, self._rng
        if len(self._leases) > 2:
            lease.release(tables, self._leases.pop(0))
        if len(self._writing) > 1:
            slots.abort(tables, self._writing.pop(0))
        if self._paths and rng.random() < 0.4:
            found = self._find(self._keys_of(rng.choice(self._paths)))
            taken = lease.take(tables, [found], holder=_HOLDER, now=0.0) if len(found) else None
            self._leases += taken or []
        if self._paths and rng.random() < 0.2:
            self._reserve((*rng.choice(self._paths)[:4], -1 - rng.randrange(10**6)))
        tables.undo.settle()

    def _reserve(self, path: tuple[int, ...]) -> None:
        keys = self._keys_of(path)
        found = self._find(keys[:-1])
        if len(found) == len(path) - 1:
            parent = keys[-2:-1] if len(found) else None
            self._writing.append(self.tier.reserve(keys[-1:], parent=parent, depth=len(found)))

"""What is published of blocks, whatever is told of them and happens to them, in whatever order."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvray.actors.shard.events import described_blocks
from kvray.actors.shard.events.described_blocks import (
    DISK,
    HOST,
    DescribedBlocks,
    NamespaceTerms,
    check_chain,
)
from kvray.errors import ConfigError
from kvray.events import Batch, BlockRemoved, BlockStored
from kvray.events.pool_content import PoolContent
from tests.examples import examples

SIZE = 2
NAMESPACES = (7, 2**32 - 1)
MEDIUM = {HOST: "CPU", DISK: "STORAGE"}


def key_of(namespace: int, block: int) -> bytes:
    return hashlib.sha256(b"%d %d" % (namespace, block)).digest()


def number_of(namespace: int, block: int) -> int:
    return int.from_bytes(key_of(namespace, block)[:8], "big")


def table_keys(*keys: bytes):
    return np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 4)


def chain_of(namespace: int, first: int, end: int) -> tuple[bytes, bytes, bytes]:
    """Return what an engine tells of blocks of the one prompt that a namespace has."""
    parent = key_of(namespace, first - 1)[:8] if first else b""
    hashes = b"".join(key_of(namespace, block)[:8] for block in range(first, end))
    tokens = np.repeat(np.arange(first, end, dtype="<u4"), SIZE).tobytes()
    return parent, hashes, tokens


class Published(RuleBasedStateMachine):
    """Compares what a subscriber would have with what the tiers have and engines have told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = DescribedBlocks(Path(":memory:"), bytes_max=2**24)
        self.parts = {namespace: {0} for namespace in NAMESPACES}
        self.held: dict[tuple[str, int, int], set[int]] = {}
        self.told: set[tuple[int, int]] = set()
        self.heard: dict[tuple[int, str], dict[int, tuple[int | None, tuple[int, ...]]]] = {}
        self._set_terms()

    def _set_terms(self) -> None:
        self.blocks.set_terms(
            {one: NamespaceTerms(SIZE, frozenset(parts)) for one, parts in self.parts.items()}
        )

    @rule(namespace=st.sampled_from(NAMESPACES), first=st.integers(0, 6), length=st.integers(1, 4))
    def an_engine_tells(self, namespace: int, first: int, length: int) -> None:
        self.blocks.describe(namespace, SIZE, chain_of(namespace, first, first + length))
        self.told |= {(namespace, block) for block in range(first, first + length)}

    @rule(
        tier=st.sampled_from([HOST, DISK]),
        namespace=st.sampled_from(NAMESPACES),
        part=st.integers(0, 1),
        blocks=st.sets(st.integers(0, 9), min_size=1),
        has=st.booleans(),
    )
    def a_tier_changes(
        self, tier: str, namespace: int, part: int, blocks: set[int], has: bool
    ) -> None:
        keys = table_keys(*(key_of(namespace, block) for block in blocks))
        self.blocks.change(tier, keys, np.full(len(keys), part, dtype=np.uint32), has=has)
        for block in blocks:
            held = self.held.setdefault((tier, namespace, block), set())
            held.add(part) if has else held.discard(part)

    @rule(namespace=st.sampled_from(NAMESPACES), parts=st.sets(st.integers(0, 1)))
    def ranks_come_or_go(self, namespace: int, parts: set[int]) -> None:
        self.parts[namespace] = parts
        self._set_terms()

    @rule(step=st.integers(1, 8))
    def news_are_published(self, step: int) -> None:
        self._publish(step)

    def _publish(self, step: int) -> bool:
        news = self.blocks.take_news(step)
        for namespace, events in (news or {}).items():
            for event in events:
                self._hear(self.heard, namespace, event)
        return news is not None

    def _hear(self, heard, namespace: int, event) -> None:
        content = heard.setdefault((namespace, event.medium), {})
        if isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                del content[block]  # it was there
            return
        assert isinstance(event, BlockStored)
        parent = event.parent_block_hash
        for at, block in enumerate(event.block_hashes):
            assert block not in content
            content[block] = parent, tuple(event.token_ids[at * SIZE : (at + 1) * SIZE])
            parent = block

    @invariant()
    def a_snapshot_is_what_was_published(self) -> None:
        heard: dict = {}
        for namespace in NAMESPACES:
            place: int | None = 0
            while place is not None:
                events, place = self.blocks.page(namespace, place, 3)
                for event in events:
                    self._hear(heard, namespace, event)
            count = sum(len(its) for (one, _), its in self.heard.items() if one == namespace)
            assert self.blocks.num_told(namespace) == count
        assert heard == {place: its for place, its in self.heard.items() if its}

    def teardown(self) -> None:
        while self._publish(5):
            pass
        for tier, medium in MEDIUM.items():
            for namespace in NAMESPACES:
                wanted = {
                    number_of(namespace, block): (
                        number_of(namespace, block - 1) if block else None,
                        (block,) * SIZE,
                    )
                    for block in range(12)
                    if self.parts[namespace]
                    and self.held.get((tier, namespace, block), set()) >= self.parts[namespace]
                    and (namespace, block) in self.told
                }
                assert self.heard.get((namespace, medium), {}) == wanted
        self.blocks.close()


TestPublished = Published.TestCase
TestPublished.settings = settings(max_examples=examples(120), stateful_step_count=25)


@contextlib.contextmanager
def opened(path: Path, *, bytes_max: int = 2**24) -> Iterator[DescribedBlocks]:
    """Give a file in which namespace 1 has one part."""
    with contextlib.closing(DescribedBlocks(path, bytes_max=bytes_max)) as made:
        made.set_terms({1: NamespaceTerms(SIZE, frozenset({0}))})
        yield made


@pytest.fixture
def blocks(tmp_path: Path) -> Iterator[DescribedBlocks]:
    with opened(tmp_path / "events.sqlite") as made:
        yield made


def change(blocks: DescribedBlocks, *numbers: int, has: bool, namespace: int = 1) -> None:
    """Have the memory hold part 0 of blocks, or no more."""
    keys = table_keys(*(key_of(namespace, block) for block in numbers))
    blocks.change(HOST, keys, np.zeros(len(numbers), dtype=np.uint32), has=has)


def publish_all(blocks: DescribedBlocks) -> None:
    while blocks.take_news(100) is not None:
        pass


def num_rows(blocks: DescribedBlocks) -> int:
    return blocks._file.execute("SELECT count(*) FROM blocks").fetchone()[0]


@pytest.mark.parametrize(
    "chain",
    [
        *((b"", b"1" * size, tokens) for size, tokens in ((7, b""), (8, b""), (16, bytes(8)))),
        *((b"", b"1" * 8, tokens) for tokens in (bytes(9), "8 letters"[:8], [0] * 8)),
        *((parent, b"1" * 8, bytes(8)) for parent in (b"1", "", None)),
        *((b"", b"1" * 8), b"chain", 7),
    ],
)
def test_what_is_no_chain_is_refused(chain):
    with pytest.raises(ConfigError, match="parent, hashes, tokens"):
        check_chain(chain, tokens_per_block=SIZE)


def test_a_chain_counts_all_that_it_takes():
    assert check_chain(chain_of(1, 0, 3), tokens_per_block=SIZE) > 3 * 8 + 3 * SIZE * 4
    assert check_chain((b"", b"", b""), tokens_per_block=SIZE) > 100


def test_a_full_file_takes_no_more_and_has_room_again_when_blocks_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(described_blocks, "_GONE_MIN", 10)
    with opened(tmp_path / "a", bytes_max=2**17) as blocks:
        for block in range(10_000):
            change(blocks, block, has=True)
            if not blocks.describe(1, SIZE, chain_of(1, block, block + 1)):
                break
        assert 500 < block < 5000
        before, held = blocks.generation, num_rows(blocks)
        change(blocks, *range(2000), has=True, namespace=2)
        assert num_rows(blocks) == held
        publish_all(blocks)
        for gone in range(block + 1):
            change(blocks, gone, has=False)
        publish_all(blocks)
        assert blocks.num_told(1) == 0
        assert blocks.describe(1, SIZE, chain_of(1, 20_000, 20_001))
        assert blocks.generation > before, "what was forgotten is to be told again"
    assert (tmp_path / "a").stat().st_size < 2**18


@pytest.mark.parametrize("step", [3, 100])
@pytest.mark.parametrize("is_told_first", [True, False])
def test_whatever_their_slots_parents_are_published_first(blocks, is_told_first, step):
    acts = [
        lambda: blocks.describe(1, SIZE, chain_of(1, 0, 40)),
        lambda: change(blocks, *reversed(range(40)), has=True),
    ]
    for act in acts if is_told_first else reversed(acts):
        assert not blocks.take_news(100)
        act()
    heard, again = PoolContent(blocks_max=100), PoolContent(blocks_max=100)
    while (news := blocks.take_news(step)) is not None:
        heard.apply(Batch(at=0.0, events=news.get(1, [])))
    place: int | None = 0
    while place is not None:
        events, place = blocks.page(1, place, 7)
        again.apply(Batch(at=0.0, events=events))
    assert len(heard) == len(again) == 40


def test_what_was_published_is_not_forgotten_before_its_end_is(blocks, monkeypatch):
    monkeypatch.setattr(described_blocks, "_GONE_MAX", 0)
    blocks.describe(1, SIZE, chain_of(1, 5, 9))
    blocks.describe(1, SIZE, chain_of(1, 0, 1))
    change(blocks, 0, has=True)
    assert blocks.take_news(9)
    change(blocks, 0, has=False)
    blocks.prune()
    ((event,),) = blocks.take_news(9).values()
    assert event == BlockRemoved(block_hashes=[number_of(1, 0)], medium="CPU")


def test_too_much_that_waits_to_be_published_is_seen(blocks, monkeypatch):
    monkeypatch.setattr(described_blocks, "_CHANGED_MAX", 5)
    assert not blocks.is_behind
    blocks.describe(1, SIZE, chain_of(1, 0, 9))
    assert blocks.is_behind
    publish_all(blocks)
    assert not blocks.is_behind


def test_what_nobody_told_of_leaves_nothing_behind(blocks):
    change(blocks, *range(5), has=True)
    change(blocks, *range(5), has=False)
    publish_all(blocks)
    assert num_rows(blocks) == 0


def test_another_run_finds_tokens_ports_and_notes_and_nothing_held(tmp_path):
    with opened(tmp_path / "a") as first:
        first.describe(1, SIZE, chain_of(1, 0, 1))
        change(first, 0, has=True)
        assert first.take_news(9)
        first.set_ports({"r": 5557})
        first.set_note("last", 2**60)
        generation = first.generation
    with opened(tmp_path / "a") as again:
        assert again.num_told(1) == 0
        assert again.ports() == {"r": 5557}
        assert again.note("last") == 2**60
        assert again.generation == generation
        publish_all(again)
        change(again, 0, has=True)
        ((event,),) = again.take_news(9).values()
        assert event.block_hashes == [number_of(1, 0)]


def test_of_many_blocks_that_are_gone_the_oldest_are_forgotten(blocks, monkeypatch):
    monkeypatch.setattr(described_blocks, "_GONE_MAX", 4)
    generation = blocks.generation
    blocks.describe(1, SIZE, chain_of(1, 0, 4))
    blocks.prune()
    assert blocks.generation == generation
    blocks.describe(1, SIZE, chain_of(1, 4, 5))
    blocks.prune()
    assert blocks.generation == generation + 1
    left = blocks._file.execute("SELECT key FROM blocks ORDER BY id").fetchall()
    assert [key % 2**64 for (key,) in left] == [number_of(1, block) for block in (2, 3, 4)]

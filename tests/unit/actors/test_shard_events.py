"""A shard without Ray that publishes KV events, an engine that tells tokens, and a subscriber."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvray.actors.owner.ownership import EVENTS_FILE
from kvray.actors.shard.events import described_blocks, publisher
from kvray.actors.shard.events.publisher import EventSettings
from kvray.actors.shard.shard import Shard
from kvray.errors import ConfigError, ShardUnavailable
from kvray.events.subscriber import Source, Subscriber
from kvray.identity.block import BlockKey, Namespace
from kvray.identity.keys import chain_packed, pack, request_seed
from kvray.node import attach, link
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena, PartRequest
from tests.kv_subscriber import KvSubscriber
from tests.unit.actors.conftest import StartShard
from tests.unit.actors.small_shard import NAMESPACE, nvme_for
from tests.unit.events.attacks import attacked
from tests.unit.events.test_publisher import free_port
from tests.unit.node.conftest import registration
from tests.unit.store.small_arena import SLOT, store
from tests.waiting import wait_for

FULL = "There are more blocks than 32 MiB can describe; the others are not published."
SIZE = NAMESPACE.tokens_per_block
MINE = replace(NAMESPACE, part_bytes=SLOT)


def settings(host: str = "127.0.0.1") -> EventSettings:
    return EventSettings(host=host, port=free_port(), bytes_max=2**25)


class Engine:
    """The link of an engine, which tells the tokens of its prompts."""

    def __init__(self, directory: Path, replica: str, namespace: Namespace) -> None:
        self.namespace = namespace
        self._link = attach(directory, label=replica, lock_wait_s=5.0, attach_retry_s=0.05)
        parts = tuple(map(PartRequest, range(namespace.num_parts)))
        self.registration = registration(replica, namespace=namespace, part_requests=parts)
        self.tokens = self.registration.log.block_tokens
        self._link.register(self.registration)
        wait_for(lambda: self.tokens.generation)

    def close(self) -> None:
        self._link.unregister(self.registration)
        self._link.detach()

    def prompt(self, *blocks: int, tail: int = 0) -> list[BlockKey]:
        """Tell the tokens of a prompt, block `n` having token `n` only, and return its keys."""
        tokens = pack([block for block in blocks for _ in range(SIZE)] + [1] * tail)
        seed = request_seed(self.namespace.digest())
        keys = chain_packed(tokens, tokens_per_block=SIZE, seed=seed)
        self.tokens.note(keys, 0, tokens)
        return keys


class Node:
    """A shard that publishes KV events on free ports, once it is started, and who hears them."""

    def __init__(
        self, make_shard: StartShard, attach: Callable[[], Arena], directory: Path
    ) -> None:
        self._make_shard, self.attach, self.directory = make_shard, attach, directory
        self.stack = contextlib.ExitStack()

    def start(self, **changes: Any) -> Shard:
        asked = {"events": settings(), "policy": "lru", "admission": "all", **changes}
        self.shard = self._make_shard(**asked)
        return self.shard

    def join(self, replica: str = "r", namespace: Namespace = MINE) -> Engine:
        engine = Engine(self.directory, replica, namespace)
        self.stack.callback(engine.close)
        return engine

    def addresses(self, replica: str = "r") -> list[str]:
        wait_for(lambda: replica in self.shard.status()["events"]["replicas"], "the ports")
        found: list[str] = self.shard.status()["events"]["replicas"][replica]
        return found

    def subscribe(self, *addresses: str) -> KvSubscriber:
        return self.stack.enter_context(KvSubscriber(*(addresses or self.addresses())))

    def check(self, engine: Engine) -> None:
        """Return once what an engine stores now is published."""
        keys, sub = engine.prompt(1, 2), self.subscribe()
        store(self.attach(), keys)
        sub.read_until(has(keys))
        assert self.shard.status()["events"]["problem"] == ""


@pytest.fixture
def node(
    make_shard: StartShard,
    attach: Callable[[], Arena],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Node]:
    """A node whose engines report more often than others."""
    monkeypatch.setattr(link, "_REPORT_S", 0.1)
    made = Node(make_shard, attach, directory)
    with made.stack:
        yield made


def hashes(keys: list[BlockKey]) -> set[int]:
    return {int.from_bytes(key[:8], "big") for key in keys}


def has(keys: list[BlockKey], medium: str = "CPU") -> Callable[[KvSubscriber], bool]:
    return lambda subscriber: set(subscriber.content[medium]) == hashes(keys)


def test_demoted_blocks_are_stored_on_disk_and_removed_from_memory(node):
    shard = node.start(nvme=nvme_for(node.directory.parent), free_target=0.5)
    engine = node.join()
    prompts = [engine.prompt(at, at + 1, at + 2, at + 3) for at in range(0, 80, 4)]
    everything = [key for keys in prompts for key in keys]
    arena, sub = node.attach(), node.subscribe()
    for keys in prompts:
        store(arena, keys)
        sub.read(0.05)  # so slowly that there is always room

    def is_right(one: KvSubscriber) -> bool:
        found = shard.requests.whereabouts(None, b"".join(everything))
        host = {key for key, there in zip(everything, found.host, strict=True) if there}
        either = {key for key, there in zip(everything, found.either, strict=True) if there}
        in_both = {*one.content["CPU"], *one.content["STORAGE"]}
        return has(list(host))(one) and in_both == hashes(list(either))

    sub.read_until(is_right)
    assert set(sub.content["STORAGE"]) - set(sub.content["CPU"])
    assert any(medium == "CPU" for medium, _ in sub.removed)
    # A block that is on its way to the disk just now goes with a later one.
    wait_for(lambda: not shard.clear(timeout_s=10))
    sub.read_until(lambda one: not one.content["CPU"] and not one.content["STORAGE"])


def test_a_block_is_published_when_all_parts_are_there_and_removed_with_the_first(node):
    node.start()
    keys = node.join(namespace=replace(MINE, num_parts=2)).prompt(1, 2)
    arena, sub = node.attach(), node.subscribe()
    store(arena, keys, part=0)
    store(arena, keys[:1], part=1)
    sub.read_until(has(keys[:1]))
    store(arena, keys[1:], part=1, parent=keys[0], depth=1)
    sub.read_until(has(keys))
    assert sub.num_gaps <= 1


def test_replicas_of_one_namespace_have_ports_of_their_own_and_the_same_blocks(node):
    node.start()
    namespaces = {"r": MINE, "s": MINE, "t": replace(MINE, model="key:other")}
    engines = [node.join(*one) for one in namespaces.items()]
    keys, _, theirs = (engine.prompt(1, 2) for engine in engines)
    places = [node.addresses(replica) for replica in namespaces]
    assert len({address for pair in places for address in pair}) == 6
    arena, subs = node.attach(), [node.subscribe(*place) for place in places]
    store(arena, keys)
    store(arena, theirs)
    for sub, wanted in zip(subs, (keys, keys, theirs), strict=True):
        sub.read_until(has(wanted))


def test_a_shard_that_starts_again_publishes_what_its_arena_has_without_new_prompts(node):
    events = settings()
    shard, engine = node.start(events=events), node.join()
    keys, gone = engine.prompt(1, 2, 3), engine.prompt(9, 8)
    arena, sub, places = node.attach(), node.subscribe(), node.addresses()
    for prompt in (keys, gone):
        store(arena, prompt)
    sub.read_until(has([*keys, *gone]))
    shard.stop(retire=False, timeout_s=10)
    lease = arena.lease(keys)

    node.start(events=events).clear(timeout_s=10)  # `gone` goes, the rest is leased

    assert node.addresses() == places
    sub.read_until(has(keys))
    arena.release(*lease)


def overwrite(file: Path) -> None:
    file.write_bytes(b"no database" * 1000)


def leave_a_bad_row(file: Path) -> None:
    with contextlib.closing(described_blocks.DescribedBlocks(file, bytes_max=2**24)) as blocks:
        blocks._file.execute("INSERT INTO notes VALUES ('last', 'text')")


@pytest.mark.parametrize("damage", [overwrite, leave_a_bad_row])
def test_a_damaged_file_is_made_again_and_goes_with_the_arena(node, monkeypatch, damage):
    monkeypatch.setattr(publisher, "_AGAIN_S", 0.1)
    node.directory.mkdir()
    damage(node.directory / EVENTS_FILE)
    shard = node.start()
    node.check(node.join())
    files = [*node.directory.glob(f"{EVENTS_FILE}*")]
    assert len(files) == 3, "SQLite's companions are there while it is used"
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    shard.stop(retire=True, timeout_s=10)
    assert not node.directory.exists()


def test_tokens_that_are_forgotten_are_told_again_with_their_prompts(node, monkeypatch):
    monkeypatch.setattr(described_blocks, "_GONE_MAX", 8)
    monkeypatch.setattr(publisher, "_PRUNE_S", 0.05)
    node.start()
    engine = node.join()
    first = engine.tokens.generation
    keys = engine.prompt(*range(20))
    wait_for(lambda: engine.tokens.generation != first)
    sub = node.subscribe()
    store(node.attach(), keys)
    wait_for(lambda: engine.prompt(*range(20)) and sub.read(0.05).content["CPU"])
    sub.read_until(has(keys))


# -- what waits to be described -------------------------------------------------------------------


def told(size: int) -> Any:
    return publisher._Told(namespace=1, tokens_per_block=SIZE, chains=[], size=size)


def test_each_connection_has_its_turn_and_a_bounded_speed():
    waiting = publisher._Waiting()
    loud = [told(publisher._TOLD_BYTES_PER_S) for _ in range(3)]
    quiet = [told(1), told(1)]
    for connection, all_told in enumerate((loud, quiet)):
        for one in all_told:
            waiting.add(connection, one)
    turns = [(0.0, loud[0]), (0.0, quiet[0]), (0.0, None), (0.5, quiet[1]), (0.9, None)]
    turns += [(1.1, loud[1]), (1.2, None), (2.2, loud[2]), (9.0, None)]
    assert [waiting.take(at) for at, _ in turns] == [one for _, one in turns]
    assert not waiting._told
    assert not waiting._sizes


def test_of_too_much_the_connection_that_told_most_loses_its_latest(monkeypatch):
    monkeypatch.setattr(publisher, "_WAITING_MAX", 100)
    waiting = publisher._Waiting()
    first, second = told(40), told(40)
    assert waiting.add(1, first)
    assert waiting.add(1, second)
    assert waiting.add(2, told(30)), "the other has to make room"
    assert not waiting.add(2, told(31))
    assert waiting.num_dropped == 2
    assert waiting.take(0.0) is first


# -- ports and files ------------------------------------------------------------------------------


def test_without_free_ports_the_shard_serves_and_says_so(node, monkeypatch):
    monkeypatch.setattr(publisher, "_PORTS_MAX", 0)
    shard = node.start()
    node.join()
    wait_for(lambda: "No two ports" in shard.status()["events"]["problem"])


def test_a_block_is_published_with_tokens_and_parent_at_both_kinds_of_addresses(node):
    node.start(events=settings("::"))
    keys, places = node.join().prompt(5, 6, 7, tail=3), node.addresses()
    sub = node.subscribe(*(place.replace("[::]", "127.0.0.1") for place in places))
    six, replay = (place.replace("[::]", "[::1]") for place in places)
    subscriber = node.stack.enter_context(contextlib.closing(Subscriber(blocks_max=100)))
    subscriber.follow({"a": Source(endpoint=six, replay_endpoint=replay)})
    store(node.attach(), keys)
    sub.read_until(has(keys))
    first, second, third = (int.from_bytes(key[:8], "big") for key in keys)
    assert sub.content["CPU"] == {
        first: (None, (5,) * SIZE),
        second: (first, (6,) * SIZE),
        third: (second, (7,) * SIZE),
    }

    def is_heard() -> bool:
        content = subscriber.content("a")
        return content is not None and len(content) == 3 and content.is_whole

    wait_for(is_heard)


# -- peers that say anything ----------------------------------------------------------------------


@contextlib.contextmanager
def peer_of(directory: Path, replica: str) -> Iterator[Callable[..., dict[str, Any]]]:
    """Give an end of the node's socket that says anything, registered as a replica."""
    with contextlib.closing(ShardSocket(directory)) as engine:
        ask = partial(engine.call, timeout_s=60, replica=replica, rank=0)
        ask("register", namespace=MINE.to_wire())
        yield ask


HASH = bytes(8)
GOOD = [b"", HASH, bytes(4 * SIZE)]
BAD_CHAINS = [[[b"", HASH, b""]], [GOOD, 7], [{}], {"a": 1}, "chains", 7, None]
"""Not chains of blocks; `check_chain` is tried with more that are none."""


def test_what_is_told_in_another_form_or_by_others_costs_itself(node, monkeypatch):
    shard, engine = node.start(), node.join("r")
    peer = node.stack.enter_context(peer_of(node.directory, "p"))
    for chains in BAD_CHAINS:
        with pytest.raises(ConfigError):
            peer("describe", chains=chains)
    assert peer("describe", chains=[GOOD])["describe"]
    assert peer("describe", chains=[GOOD], replica="r")["describe"] is None
    node.check(engine)
    monkeypatch.setattr(publisher, "_WAITING_MAX", 10_000)
    peer("describe", chains=[[b"", b"", b""]] * 100)
    assert shard.status()["events"]["dropped"] == 1, "chains of no blocks count, too"


def test_of_too_many_namespaces_the_first_are_published(node, monkeypatch):
    monkeypatch.setattr(publisher, "_NAMESPACES_MAX", 2)
    shard, engine = node.start(), node.join()
    for before, replica in ("rs", "st"):
        node.addresses(before)
        node.join(replica, replace(MINE, model=f"key:{replica}"))
    wait_for(lambda: "Only 2 of 3 namespaces" in shard.status()["events"]["problem"])
    keys, sub = engine.prompt(1, 2), node.subscribe()
    store(node.attach(), keys)
    sub.read_until(has(keys))


# -- its thread -----------------------------------------------------------------------------------


def test_a_thread_that_has_ended_is_seen(node, monkeypatch):
    monkeypatch.setattr(publisher.EventPublisher, "_run", lambda self: None)
    assert "has ended" in node.start().status()["events"]["problem"]


def test_a_thread_without_a_replica_sleeps(node):
    node.start()
    (thread,) = [one for one in threading.enumerate() if one.name == "kvray-events"]

    def cpu_s() -> float:
        (own,) = [one for one in psutil.Process().threads() if one.id == thread.native_id]
        return own.user_time + own.system_time

    began, before = time.monotonic(), cpu_s()
    time.sleep(0.5)
    assert cpu_s() - before < 0.2 * (time.monotonic() - began)


# -- attacks --------------------------------------------------------------------------------------


def told_without_end(directory: Path, until: float) -> None:
    """Tell tokens of blocks that nobody stores, as fast as the shard takes them."""
    rng = random.Random(0)
    while time.monotonic() < until:
        with (
            contextlib.suppress(ShardUnavailable),
            peer_of(directory, f"p{rng.randrange(9)}") as ask,
        ):
            for _ in range(rng.randrange(100)):
                num = rng.choice([1, 20, 500])
                parent = rng.choice([b"", HASH])
                chain = [parent, rng.randbytes(8 * num), rng.randbytes(4 * SIZE * num)]
                is_good = rng.random() < 0.8
                with contextlib.suppress(ConfigError):
                    ask("describe", chains=[chain] if is_good else rng.choice(BAD_CHAINS))


@pytest.mark.parametrize("what", ["events", "replays", "socket"])
@pytest.mark.parametrize(
    "seconds",
    [2.0, pytest.param(120.0, marks=[pytest.mark.long, pytest.mark.timeout(360)])],
)
def test_whatever_is_done_memory_is_bounded_and_who_behaves_is_served(node, line, what, seconds):
    shard, engine, process = node.start(), node.join(), psutil.Process()
    live, replay = node.addresses()
    arena, sub = node.attach(), node.subscribe()
    began = time.monotonic()
    until = began + seconds
    with contextlib.ExitStack() as stack:
        if what == "socket":
            teller = threading.Thread(target=told_without_end, args=(node.directory, until))
            teller.start()
            stack.callback(teller.join)
        else:
            stack.enter_context(attacked(seconds, live if what == "events" else replay))
        rounds, sizes, first_beat = 0, [], len(line.heard)
        while rounds < 3 or time.monotonic() < until:
            rounds += 1
            keys = engine.prompt(*range(3 * rounds, 3 * rounds + 3))
            store(arena, keys)
            last = int.from_bytes(keys[-1][:8], "big")
            sub.read_until(lambda one, last=last: last in one.content["CPU"], seconds=100)
            with KvSubscriber(live, replay) as late:
                late.read_until(lambda one, last=last: last in one.content["CPU"], seconds=100)
            sizes.append(process.memory_info().rss)
        beats_per_s = (len(line.heard) - first_beat) / (time.monotonic() - began)
    assert max(sizes) - sizes[2] < 160 * 2**20
    assert shard.status()["events"]["problem"] in ("", FULL)
    assert beats_per_s >= 1 / 4

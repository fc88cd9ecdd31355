"""Two replicas on two nodes whose namespaces differ: how they get to know of it."""

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvray.actors.lookup.lookup import Lookup
from kvray.actors.owner.ownership import sweep
from kvray.actors.shard.shard import Shard
from kvray.identity.block import Namespace
from kvray.node import NodeLink, PrefixDigests, Registration, attach
from kvray.node import link as link_module
from kvray.trace.prefix_digest import prefix_digest
from tests.unit.actors.small_shard import NAMESPACE, Line, settings_for, wait_until_serving
from tests.waiting import wait_for

PROMPT = prefix_digest(list(range(500)))
OTHER_PROMPT = prefix_digest(list(range(1, 501)))
MISSED = "miss_tokens_not_stored"
FOUND = "miss_tokens_incompatible"

TP1 = replace(NAMESPACE, model="sha256:llama")
TP2 = replace(TP1, tp_layout="tp2", part_bytes=256)


@dataclass(kw_only=True)
class Replica:
    """A replica on a node of its own: a shard, a link to it, and what a connector would count."""

    name: str
    shard: Shard
    link: NodeLink
    prefix_digests: PrefixDigests = field(default_factory=PrefixDigests)
    missed_tokens: int = 0

    def register(self, namespace: Namespace) -> None:
        self.link.register(
            Registration(
                replica=self.name,
                rank=0,
                namespace=namespace,
                counters=lambda: self.prefix_digests.counted({MISSED: self.missed_tokens}, MISSED),
                prefix_digests=self.prefix_digests,
            )
        )

    def miss(self, prefix_digest: bytes, num_tokens: int) -> None:
        self.missed_tokens += num_tokens
        self.prefix_digests.note_missed(prefix_digest, num_tokens)

    def restart_shard(self, line: Line, lookup: Lookup) -> None:
        """Have another shard, which finds another lookup."""
        self.shard.stop(retire=False, timeout_s=10)
        line.lookup = lookup
        self.shard = Shard(self.shard.name, settings_for(self.link.directory), [line.announce])
        self.shard.start()
        wait_until_serving(self.shard)
        wait_for(lambda: self.counters() is not None, "registering again")

    def counters(self) -> dict[str, int] | None:
        """Return what the shard shows of this replica; None if it knows none."""
        (entry,) = self.shard.status().get("replicas") or [{"counters": None}]
        return entry["counters"]

    def wait_until_told(self) -> None:
        wait_for(lambda: not self.prefix_digests.waiting(), "the report")


StartReplica = Callable[[str], Replica]


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def start(line: Line, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartReplica]:
    """Starts replicas by name, each on a node of its own."""
    monkeypatch.setattr(link_module, "_REPORT_S", 0.02)
    replicas: list[Replica] = []

    with ExitStack() as stack:

        def begin(name: str) -> Replica:
            parent = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
            stack.callback(shutil.rmtree, parent)
            directory = parent / "kvray-test"
            shard = Shard(f"shard-{name}", settings_for(directory), [line.announce])
            stack.callback(sweep, directory)
            shard.start()
            wait_until_serving(shard)
            link = attach(directory, label=name, lock_wait_s=0.05, attach_retry_s=0.02)
            stack.callback(link.detach)
            replicas.append(Replica(name=name, shard=shard, link=link))
            return replicas[-1]

        yield begin
        for one in replicas:
            one.link.detach()
            one.shard.stop(retire=False, timeout_s=10)


def pair_of(start: StartReplica, mine: Namespace, theirs: Namespace) -> tuple[Replica, Replica]:
    """Return two replicas of which the first has stored `PROMPT`, and the lookup knows it."""
    a, b = start("a"), start("b")
    a.register(mine)
    b.register(theirs)
    a.prefix_digests.note_stored(PROMPT)
    a.wait_until_told()
    return a, b


def wait_until_known(line: Line) -> None:
    """Return when the lookup knows a prefix digest, which the tests' first replica has stored."""
    wait_for(lambda: line.lookup.status(0.0)["prefix_digests"], "the announcement")


def num_heard(line: Line, shard: str) -> int:
    return sum(announcement.shard == shard for announcement in line.heard)


def test_a_miss_of_what_another_namespace_has_is_counted_and_explained(
    start: StartReplica, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    _, b = pair_of(start, TP1, TP2)
    wait_until_known(line)
    b.miss(PROMPT, 480)
    b.prefix_digests.note_stored(PROMPT)
    b.miss(OTHER_PROMPT, 64)
    wait_for(lambda: b.counters() == {MISSED: 64, FOUND: 480}, "the finding")
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "480 tokens" in warning
    assert "replica 'a'" in warning
    assert "  tp_layout: here tp2, there tp1\n" in warning
    assert "  part_bytes: here 256, there 512\n" in warning


def test_a_miss_between_equal_namespaces_is_no_incompatible_one(
    start: StartReplica, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    _, b = pair_of(start, TP1, TP1)
    wait_until_known(line)
    b.miss(PROMPT, 480)
    b.wait_until_told()
    heard = num_heard(line, "shard-b")
    wait_for(lambda: num_heard(line, "shard-b") > heard + 1, "the announcement")
    time.sleep(0.1)
    assert b.counters() == {MISSED: 480}
    assert not caplog.records


def test_a_restarted_lookup_still_knows(start: StartReplica, line: Line) -> None:
    _, b = pair_of(start, TP1, TP2)
    wait_until_known(line)
    line.lookup = Lookup()
    wait_until_known(line)
    b.miss(PROMPT, 480)
    wait_for(lambda: b.counters() == {MISSED: 0, FOUND: 480}, "the finding")


def test_what_was_noted_while_the_lookup_was_away_is_answered_later(
    start: StartReplica, line: Line
) -> None:
    line.cut = True
    _, b = pair_of(start, TP1, TP2)
    b.miss(PROMPT, 480)
    b.wait_until_told()
    line.cut = False
    wait_until_known(line)
    b.miss(PROMPT, 480)
    wait_for(lambda: (b.counters() or {}).get(FOUND, 0) >= 480, "the finding")


def test_a_restarted_shard_learns_again_what_is_in_use(start: StartReplica, line: Line) -> None:
    a, b = pair_of(start, TP1, TP2)
    wait_until_known(line)
    a.restart_shard(line, lookup=Lookup())

    def is_known_after_use() -> bool:
        # The link forgets what it told the old shard after the new one shows the rank.
        a.prefix_digests.note_stored(PROMPT)
        return bool(line.lookup.status(0.0)["prefix_digests"])

    wait_for(is_known_after_use, "the announcement")
    b.miss(PROMPT, 480)
    wait_for(lambda: b.counters() == {MISSED: 0, FOUND: 480}, "the finding")


def test_what_a_replica_noted_last_arrives_when_it_ends(
    start: StartReplica, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = start("a"), start("b")
    a.register(TP1)
    b.register(TP2)
    monkeypatch.setattr(link_module, "_REPORT_S", 60.0)
    time.sleep(0.1)
    a.prefix_digests.note_stored(PROMPT)
    a.link.detach()
    monkeypatch.setattr(link_module, "_REPORT_S", 0.02)
    wait_until_known(line)


def test_the_namespace_is_in_the_shards_status(start: StartReplica) -> None:
    a, _ = pair_of(start, TP1, TP2)
    status = a.shard.status()
    (replica,) = status["replicas"]
    assert status["namespaces"][replica["namespace"]] == TP1.to_wire()

"""An engine whose checkpoint is still being read goes without the tier, and joins it then."""

import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvray.connector import KvRayWorker
from kvray.engine import model_name, shared_state
from kvray.engine.meta import ConnectorMeta
from kvray.engine.model_name import ModelName
from kvray.errors import ConfigError, LayoutMismatch
from kvray.identity.fingerprint import Progress
from tests.kit.connector import HIT, PROMPT, Pair, Request, args_for
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.connector.conftest import MakePair
from tests.waiting import wait_for


class SlowReading:
    """Stands in for the reading of a checkpoint, which ends when it is let go."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.found: str | BaseException = "ab" * 32

    def __call__(self, path: str, *, cache_dir: Path | None, progress: Progress) -> str:
        progress.done_bytes, progress.total_bytes = 3 * 10**9, 12 * 10**9
        while not self.may_end.wait(0.002):
            progress.on_step()
        if isinstance(self.found, BaseException):
            raise self.found
        return self.found


@pytest.fixture(autouse=True)
def _without_model_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVRAY_CONNECTOR__MODEL_KEY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowReading]:
    """Have the engines of a test wait for one reading."""
    reading = SlowReading()
    monkeypatch.setattr(model_name, "fingerprint_model", reading)
    monkeypatch.setattr(shared_state, "_NAME_WAIT_S", 0.0)
    yield reading
    reading.may_end.set()


@pytest.fixture
def args(tmp_path: Path) -> SimpleNamespace:
    return args_for(model=str(write_tiny_checkpoint(tmp_path / "model", seed=1)))


@pytest.fixture
def pair(make_pair: MakePair, args: SimpleNamespace, reading: SlowReading) -> Pair:
    return make_pair(args)


def let_go(reading: SlowReading, pair: Pair) -> None:
    reading.may_end.set()
    wait_for(lambda: bool(pair.worker._rank.shared.model_name.name), "reading the checkpoint")


def test_an_engine_starts_and_serves_without_the_tier_until_its_checkpoint_is_known(pair, reading):
    assert pair.serve(Request(1, PROMPT)) == pair.serve(Request(2, PROMPT)) == 0
    assert pair.totals["miss_tokens_fingerprinting"] == 2 * HIT
    assert (pair.totals["requests"], pair.totals["prompt_tokens"]) == (2, 2 * len(PROMPT))
    assert not pair.totals["stored_blocks"] + pair.totals["errors"]
    let_go(reading, pair)
    assert pair.serve(Request(3, PROMPT)) == 0, "nothing was saved before"
    pair.flush()
    assert pair.serve(Request(4, PROMPT)) == HIT
    assert pair.totals["miss_tokens_fingerprinting"] == 2 * HIT


def test_what_is_computed_of_a_request_that_came_before_the_name_is_not_saved(pair, reading):
    request = Request(1, PROMPT)
    assert pair.query(request) == 0
    let_go(reading, pair)
    meta = pair.plan(request)
    assert not meta.saves
    pair.worker.start_load_kv(None)
    pair.compute(request)
    pair.finish(request)


def test_the_shard_hears_how_far_the_reading_is_and_then_of_the_namespace(shard, pair, reading):
    def figures() -> dict[str, Any]:
        pair.engine.link._attempt(pair.engine.link._report)
        (found,) = [one for one in shard.status()["replicas"] if one["connected"]]
        return dict(found)

    before = figures()
    assert before["counters"]["fingerprint_bytes"] == 12 * 10**9
    assert before["counters"]["fingerprint_bytes_read"] == 3 * 10**9
    let_go(reading, pair)
    pair.serve(Request(1, PROMPT))
    after = figures()
    assert "fingerprint_bytes" not in after["counters"]
    assert after["namespace"] == pair.engine.identity.digest.hex()[:8]
    assert after["namespace"] != before["namespace"]


def test_the_log_says_how_far_it_is_and_what_to_do(args, reading, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(model_name, "_LOG_S", 0.01)
    name = ModelName(args.model, None, cache_dir=tmp_path)
    wait_for(lambda: "is still being read, 3.0 of 12.0 GB" in caplog.text, "the progress")
    assert "connector.model_key names the model at once" in caplog.text
    assert "s left" not in caplog.text, "it has just begun"
    name._began_at = time.monotonic() - 10_000
    assert name.find(0) == ""
    assert "is being read to tell it from others, 3.0 of 12.0 GB, about 300" in caplog.text
    name.close()


@pytest.mark.parametrize("kind", [MemoryError, SystemExit, ConfigError])
def test_a_reading_that_fails_leaves_the_engine_without_the_tier(pair, reading, caplog, kind):
    reading.found = kind("what has failed")
    reading.may_end.set()
    wait_for(lambda: "goes on without the tier: what has failed" in caplog.text, "the failure")
    assert pair.serve(Request(1, PROMPT)) == pair.serve(Request(2, PROMPT)) == 0
    assert pair.totals["miss_tokens_fingerprinting"] == 2 * HIT
    assert pair.engine.model_name.counters()["fingerprint_failed"] == 1


def test_a_checkpoint_that_changed_since_the_start_is_not_named(shard, args, reading, caplog):
    worker = KvRayWorker(args)
    time.sleep(0.02)
    (Path(args.model) / "config.json").write_text("{}")
    reading.may_end.set()
    name = worker._rank.shared.model_name
    assert name.find(10) == ""
    assert "have changed since the engine started" in name.failure
    assert "is being read" not in caplog.text, "nothing is any more"
    name.close()
    name.failure = ""
    assert name.find(10) == ""
    assert name.failure, "whoever reads it again does not know either"
    worker.shutdown()


def test_an_engine_that_ends_does_not_go_on_reading(shard, args, reading, caplog):
    worker = KvRayWorker(args)
    thread = worker._rank.shared.model_name._thread
    worker.shutdown()
    assert not thread.is_alive()
    assert "goes on without the tier" not in caplog.text


# Ranks that know it at different times.


Ranks = tuple[Pair, Pair, SlowReading]


@pytest.fixture
def ranks(make_pair: MakePair, args: SimpleNamespace, request: pytest.FixtureRequest) -> Ranks:
    """Return (a leader that knows the name and has saved PROMPT, another rank, its reading)."""
    leader = make_pair(args)
    leader.store(PROMPT)
    late: SlowReading = request.getfixturevalue("reading")
    late.found = leader.engine.model_name.name.removeprefix("sha256:")
    return leader, make_pair(SimpleNamespace(**vars(args))), late


def begin(leader: Pair, rank: Pair, request: Request, matched: int = HIT) -> ConnectorMeta:
    """Plan a pass of `request`, and have the other rank begin it."""
    assert leader.query(request) == matched
    meta: ConnectorMeta = pickle.loads(pickle.dumps(leader.plan(request)))  # noqa: S301 - our own
    rank.worker.bind_connector_meta(meta)
    rank.worker.start_load_kv(None)
    return meta


def test_a_rank_that_does_not_know_the_name_loads_what_its_leader_promises_and_saves_nothing(ranks):
    leader, rank, late = ranks
    request = Request(2, PROMPT)
    assert begin(leader, rank, request).model == leader.engine.model_name.name
    rank.end_pass()
    rank.check(request)
    saving = begin(leader, rank, Request(3, [7, *PROMPT]), matched=0)
    rank.end_pass()
    rank.flush()
    assert (bool(saving.saves), saving.model) == (True, "")
    assert not rank.totals["stored_blocks"]
    assert rank.totals["dropped_blocks_no_pool"] == rank.totals["dropped_blocks"] == 1 + 10
    let_go(late, rank)
    begin(leader, rank, Request(4, PROMPT))
    assert rank.engine.identity.digest == leader.engine.identity.digest


def test_a_rank_with_another_checkpoint_than_its_leader_stops_the_engine(ranks):
    leader, rank, late = ranks
    late.found = "cd" * 32
    let_go(late, rank)
    with pytest.raises(LayoutMismatch, match=r"another namespace.*same engine arguments"):
        begin(leader, rank, Request(2, PROMPT))
    assert leader.leased == 0
    assert rank.totals["dropped_blocks_no_pool"] == 1


def test_a_rank_that_knows_no_name_refuses_another_layout(ranks):
    leader, rank, _ = ranks
    rank.worker.register_kv_caches(torch.zeros(64, 2, 2, 16))
    with pytest.raises(LayoutMismatch, match="another namespace"):
        begin(leader, rank, Request(2, PROMPT))


def test_a_leader_without_a_name_promises_nothing_to_ranks_that_have_one(ranks):
    known, late, _ = ranks
    begin(late, known, Request(2, PROMPT), matched=0)
    known.end_pass()
    assert not known.totals["errors"]

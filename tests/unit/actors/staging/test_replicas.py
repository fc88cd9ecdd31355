from dataclasses import replace
from typing import Any

import pytest

from kvray.actors.staging import replicas as replicas_module
from kvray.actors.staging.replicas import (
    BACK_S,
    ENDED_MAX,
    ENDED_S,
    Origin,
    Reader,
    Replicas,
    read_reader,
)
from kvray.errors import ConfigError, LayoutMismatch
from kvray.identity.block import namespace_id
from kvray.index import PARTS_MAX
from kvray.store import Membership, PartRequest
from tests.unit.actors.small_shard import NAMESPACE, OTHER_LAYOUT


@pytest.fixture
def replicas() -> Replicas:
    """Replica `one` is connected through connection 1."""
    made = Replicas()
    made.register(1, "one", 0, NAMESPACE)
    return made


def test_another_layout_under_the_same_model_key_is_refused(replicas):
    with pytest.raises(LayoutMismatch, match=r"'llama-3@1'.*kv_dtype 'float8' here, 'bfloat16'"):
        replicas.register(2, "two", 0, OTHER_LAYOUT)
    assert len(replicas.status()) == 1


def test_another_tensor_parallelism_of_the_same_model_is_welcome(replicas):
    replicas.register(2, "two", 0, replace(OTHER_LAYOUT, tp_layout="tp4"))
    assert len(replicas.status()) == 2


def test_the_same_layout_is_welcome(replicas):
    replicas.register(2, "two", 0, NAMESPACE)
    assert [entry["replica"] for entry in replicas.status()] == ["one", "two"]


def test_another_layout_is_welcome_once_the_first_hung_up(replicas):
    replicas.disconnect(1)
    replicas.register(2, "two", 0, OTHER_LAYOUT)


def test_ranks_of_one_replica_may_differ(replicas):
    replicas.register(1, "one", 1, OTHER_LAYOUT)


def test_fingerprinted_models_of_one_name_may_differ(replicas):
    replicas.register(2, "two", 0, replace(NAMESPACE, model="sha256:ab"))
    replicas.register(3, "three", 0, replace(OTHER_LAYOUT, model="sha256:ab"))


def test_figures_are_taken_from_the_registered_connection_only(replicas):
    assert replicas.report(1, "one", 0, {"hits": 3})
    assert not replicas.report(2, "one", 0, {"hits": 9})
    assert not replicas.report(1, "two", 0, {"hits": 9})
    assert replicas.status()[0]["counters"] == {"hits": 3}


def test_who_hung_up_is_shown_as_gone_with_the_last_figures(replicas):
    replicas.report(1, "one", 0, {"hits": 3})
    replicas.disconnect(1)
    (entry,) = replicas.status()
    assert (entry["connected"], entry["counters"]) == (False, {"hits": 3})
    assert not replicas.report(1, "one", 0, {"hits": 4})


def test_last_figures_stay_and_the_rank_counts_as_gone():
    replicas = Replicas()
    replicas.register(1, "one", 0, NAMESPACE)
    assert replicas.report(1, "one", 0, {"hits": 5}, leaving=True)
    assert [(r["connected"], r["counters"]) for r in replicas.status()] == [(False, {"hits": 5})]
    replicas.register(1, "two", 0, OTHER_LAYOUT)


def test_registering_again_replaces_the_entry(replicas):
    replicas.register(5, "one", 0, NAMESPACE)
    replicas.disconnect(1)
    (entry,) = replicas.status()
    assert entry["connected"]


@pytest.mark.parametrize(
    ("replica", "rank"), [("", 0), ("x" * 257, 0), (7, 0), (["x"], 0), ("x", -1), ("x", "0")]
)
def test_absurd_names_are_refused(replicas, replica, rank):
    with pytest.raises(ConfigError):
        replicas.register(2, replica, rank, NAMESPACE)
    with pytest.raises(ConfigError):
        replicas.report(2, replica, rank, {})


@pytest.mark.parametrize("field", ["model", "kv_dtype", "num_layers"])
def test_a_namespace_of_wrong_types_is_refused_before_anybody_asks_for_the_status(replicas, field):
    wrong: Any = {field: None if field != "model" else 5}
    with pytest.raises(ConfigError):
        replicas.register(2, "two", 0, replace(NAMESPACE, **wrong))
    assert len(replicas.status()) == 1


def test_a_namespace_that_is_too_long_to_be_passed_on_is_refused(replicas):
    with pytest.raises(ConfigError, match="exceeds the 65536"):
        replicas.register(2, "two", 0, replace(NAMESPACE, model="m", overrides="x" * 70_000))
    assert len(replicas.status()) == 1


def test_a_report_returns_who_made_it(replicas):
    origin = Origin(replica="one", rank=0, namespace=NAMESPACE)
    assert replicas.report(1, "one", 0, {}) == origin


def test_namespaces_are_found_by_the_digest_of_the_status(replicas):
    (entry,) = replicas.status()
    assert replicas.namespaces() == {entry["namespace"]: NAMESPACE.to_wire()}


@pytest.mark.parametrize(
    "counters",
    [5, "ab", ["a"], {"a": "b"}, {7: 7}, {"x" * 257: 1}, {str(n): n for n in range(257)}],
)
def test_absurd_figures_are_refused(replicas, counters):
    with pytest.raises(ConfigError):
        replicas.report(1, "one", 0, counters)


def test_of_too_many_ranks_the_oldest_that_hung_up_goes(replicas, monkeypatch):
    monkeypatch.setattr(replicas_module, "_RANKS_MAX", 3)
    replicas.register(2, "two", 0, NAMESPACE)
    replicas.register(3, "three", 0, NAMESPACE)
    replicas.disconnect(2)
    replicas.register(4, "four", 0, NAMESPACE)
    replicas.register(5, "five", 0, NAMESPACE)
    assert [entry["replica"] for entry in replicas.status()] == ["three", "four", "five"]


# -- how ranks read -------------------------------------------------------------------------------


def test_what_a_rank_says_of_its_reading_is_kept_while_it_is_here(replicas):
    reader = read_reader(
        NAMESPACE,
        wanted=[[0, None], [3, 4]],
        num_ranks=2,
        holder=["arena", 5, 7],
        adapters="rank 8",
    )
    replicas.register(2, "two", 1, reader)
    assert reader == Reader(
        namespace=NAMESPACE,
        part_requests=(PartRequest(0), PartRequest(3, 4)),
        num_ranks=2,
        arena_id="arena",
        member=Membership(5, 7),
        adapters="rank 8",
    )
    assert replicas.readers("two", [0, 1]) == {1: reader}
    assert replicas.first_reader("two") == (1, reader)
    assert replicas.connected() == [("one", 0), ("two", 1)]
    replicas.disconnect(2)
    assert replicas.reader("two", 1) is None
    assert replicas.first_reader("two") is None
    assert replicas.connected() == [("one", 0)]


def test_an_engine_of_before_says_nothing(replicas):
    assert replicas.reader("one", 0) == Reader(namespace=NAMESPACE)
    assert read_reader(NAMESPACE) == Reader(namespace=NAMESPACE)


@pytest.mark.parametrize(
    ("num_ranks", "rank", "ranks"), [(1, 3, [3]), (2, 0, [0, 1]), (2, 1, [0, 1])]
)
def test_a_rank_speaks_for_all_or_for_itself(num_ranks, rank, ranks):
    assert Reader(namespace=NAMESPACE, num_ranks=num_ranks).ranks(rank) == ranks


@pytest.mark.parametrize(
    "fields",
    [
        {"wanted": 5},
        {"wanted": "ab"},
        {"wanted": [5]},
        {"wanted": [[0]]},
        {"wanted": [[-1, None]]},
        {"wanted": [[1024, None]]},
        {"wanted": [[True, None]]},
        {"wanted": [[0, 0]]},
        {"wanted": [[0, "all"]]},
        {"wanted": [[0, None]] * 257},
        {"num_ranks": 0},
        {"num_ranks": 4097},
        {"num_ranks": "2"},
        {"num_ranks": True},
        {"holder": 5},
        {"holder": ["arena", 5]},
        {"holder": [5, 5, 5]},
        {"holder": ["arena", -1, 5]},
        {"adapters": 5},
        {"adapters": "x" * 70_000},
    ],
)
def test_absurd_readings_are_refused(fields):
    with pytest.raises(ConfigError):
        read_reader(NAMESPACE, **fields)


def test_a_namespace_without_a_size_cannot_be_read_by():
    absurd: Any = {"tokens_per_block": "32", "part_bytes": 0}
    reader = Reader(namespace=replace(NAMESPACE, **absurd))
    with pytest.raises(ConfigError, match="tokens_per_block"):
        _ = reader.tokens_per_block
    with pytest.raises(ConfigError, match="part_bytes"):
        _ = reader.part_bytes


# -- ranks that have ended -------------------------------------------------------------------------


class Visitors:
    """Engines that come, count and go, each under a name of its own; the time is told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.replicas = Replicas(clock=lambda: self.now)
        self.num = 0

    def visit(self, *, for_s: float = 4.0) -> None:
        self.num += 1
        self.replicas.register(self.num, f"pod-{self.num}", 0, NAMESPACE)
        counters = {"requests": 2, "prompt_tokens": 64, "uptime_s": 4}
        self.replicas.report(self.num, f"pod-{self.num}", 0, counters)
        self.now += for_s
        self.replicas.disconnect(self.num)
        self.replicas.add_up()

    def total(self, name: str) -> int:
        listed = sum(one["counters"].get(name, 0) for one in self.replicas.status())
        return int(listed + self.replicas.ended()["counters"].get(name, 0))


def test_of_hundreds_of_engines_that_come_and_go_few_are_listed_and_all_are_counted():
    visitors = Visitors()
    visitors.replicas.register(10**6, "stays", 0, NAMESPACE)
    for number in range(1, 500):
        visitors.visit()
        assert len(visitors.replicas.status()) <= 1 + ENDED_MAX
        assert visitors.total("requests") == 2 * number
    assert visitors.total("prompt_tokens") == 64 * 499
    assert visitors.replicas.connected() == [("stays", 0)]
    assert "uptime_s" not in visitors.replicas.ended()["counters"]


def test_who_has_ended_lately_is_listed_and_explained_and_later_is_not():
    visitors = Visitors()
    visitors.visit()
    visitors.now += ENDED_S - 1
    visitors.replicas.add_up()
    assert visitors.replicas.namespace_of("pod-1", 0) == NAMESPACE
    visitors.now += 1
    visitors.replicas.add_up()
    assert visitors.replicas.status() == []
    assert visitors.replicas.namespace_of("pod-1", 0) is None
    assert visitors.replicas.ended()["ranks"] == 1
    digest = NAMESPACE.digest().hex()[:8]
    assert visitors.replicas.namespaces()[digest], "its blocks may still be there"


def test_of_many_that_lose_their_connection_at_once_all_may_come_back():
    visitors = Visitors()
    for number in range(100):
        visitors.replicas.register(number, f"engine-{number}", 0, NAMESPACE)
    for number in range(100):
        visitors.replicas.disconnect(number)
    visitors.now += BACK_S - 1
    visitors.replicas.add_up()
    assert len(visitors.replicas.status()) == 100
    visitors.now += 1
    visitors.replicas.add_up()
    assert len(visitors.replicas.status()) == ENDED_MAX


def test_who_says_that_it_leaves_has_ended_then():
    visitors = Visitors()
    visitors.replicas.register(1, "a", 0, NAMESPACE)
    visitors.now = 5000.0
    visitors.replicas.report(1, "a", 0, {"requests": 1}, leaving=True)
    visitors.replicas.add_up()
    assert len(visitors.replicas.status()) == 1


def test_the_sum_has_no_more_counters_than_a_rank_may_have():
    visitors = Visitors()
    for number in range(600):
        visitors.replicas.register(number, f"r{number}", 0, NAMESPACE)
        visitors.replicas.report(number, f"r{number}", 0, {f"odd-{number}": 1})
        visitors.replicas.disconnect(number)
    visitors.now = 5000.0
    visitors.replicas.add_up()
    assert len(visitors.replicas.ended()["counters"]) == 256


def test_the_namespaces_of_those_that_ended_are_bounded():
    visitors = Visitors()
    for number in range(100):
        visitors.replicas.register(number, "r", number, replace(NAMESPACE, model=f"m{number}"))
        visitors.replicas.disconnect(number)
    visitors.now = 5000.0
    visitors.replicas.add_up()
    assert len(visitors.replicas.namespaces()) == 64


@pytest.mark.parametrize(
    ("rank", "stored_by", "parts", "part_bytes"),
    [(0, 1, [0, 1], 256), (1, 1, [0, 1], 256), (1, 4, [2, 3, 6, 7], 64), (0, 2, [0, 2], 128)],
)
def test_a_rank_of_two_reads_parts_of_other_sizes(rank, stored_by, parts, part_bytes):
    """Its own are those of two layer groups, of 128 bytes each."""
    reader = Reader(
        namespace=replace(NAMESPACE, num_parts=4, part_bytes=256),
        part_requests=(PartRequest(rank), PartRequest(2 + rank)),
        num_ranks=2,
    )
    resliced = reader.resliced(stored_by)
    assert [one.part for one in resliced.part_requests] == parts
    assert resliced.part_bytes == part_bytes


@pytest.mark.parametrize("stored_by", [3, PARTS_MAX])
def test_sizes_that_do_not_divide_or_are_too_many_are_refused(stored_by):
    reader = Reader(
        namespace=replace(NAMESPACE, num_parts=4),
        part_requests=(PartRequest(1), PartRequest(3)),
        num_ranks=2,
    )
    with pytest.raises(ConfigError, match="update the engine's kvray"):
        reader.resliced(stored_by)
    with pytest.raises(ConfigError, match="update the engine's kvray"):
        replace(reader, part_requests=()).resliced(1)


def test_the_numbers_of_namespaces_outlive_their_ranks(replicas):
    number = namespace_id(NAMESPACE.digest())
    assert number in replicas.numbers()
    replicas.disconnect(1)
    assert number in replicas.numbers()


def test_a_rank_is_told_of_its_weights_until_it_has_carried_that_out(replicas):
    order = replicas.order_weights("one", "2")
    assert order.waiting == {0}
    for done in ("", "an older one", ""):
        assert replicas.weights_order("one", 0, done) == [order.number, "2"]
    replicas.register(1, "one", 0, replace(NAMESPACE, weights="2"))  # it goes by it
    assert replicas.weights_order("one", 0, order.number) is None
    assert not order.waiting


def test_an_engine_that_was_started_again_has_not_the_weights_of_the_one_before(replicas):
    order = replicas.order_weights("one", "2")
    replicas.register(9, "one", 0, NAMESPACE)
    assert replicas.weights_order("one", 0, "") is None
    assert order.waiting == {0}


def test_of_two_orders_the_later_one_counts(replicas):
    first, second = replicas.order_weights("one", "2"), replicas.order_weights("one", None)
    assert replicas.weights_order("one", 0, first.number) == [second.number, None]
    replicas.call_off(first)
    assert replicas.weights_order("one", 0, "") == [second.number, None]
    assert first.waiting == {0}
    replicas.call_off(second)
    assert replicas.weights_order("one", 0, "") is None


def test_replicas_of_one_model_key_may_have_different_weights(replicas):
    replicas.register(2, "two", 0, replace(NAMESPACE, weights="2"))
    with pytest.raises(LayoutMismatch):
        replicas.register(3, "three", 0, replace(OTHER_LAYOUT, weights="3"))


def test_a_second_instance_of_a_name_goes_by_another_one_while_the_first_lives():
    replicas = Replicas()
    assert replicas.register(1, "chat", 0, NAMESPACE, instance="aa11") == "chat"
    assert replicas.register(2, "chat", 0, NAMESPACE, instance="bb22") == "chat-bb22"
    assert replicas.register(1, "chat", 0, NAMESPACE, instance="cc33") == "chat-cc33"
    assert replicas.register(2, "chat", 1, NAMESPACE, instance="bb22") == "chat", "another rank"
    assert replicas.report(1, "chat", 0, {"requests": 3})
    assert replicas.report(2, "chat-bb22", 0, {"requests": 10})
    assert replicas.report(1, "chat-cc33", 0, {"requests": 20})
    counted = {one["replica"]: one["counters"] for one in replicas.status() if one["rank"] == 0}
    assert {name: one["requests"] for name, one in counted.items()} == {
        "chat": 3,
        "chat-bb22": 10,
        "chat-cc33": 20,
    }


def test_an_instance_that_connects_again_keeps_its_name_and_another_gets_it_when_it_is_gone():
    replicas = Replicas()
    assert replicas.register(1, "chat", 0, NAMESPACE, instance="aa11") == "chat"
    assert replicas.register(2, "chat", 0, NAMESPACE, instance="aa11") == "chat"
    assert replicas.report(1, "chat", 0, {}) is None
    replicas.disconnect(2)
    assert replicas.register(3, "chat", 0, NAMESPACE, instance="bb22") == "chat"


def test_the_name_of_a_second_instance_is_never_too_long():
    replicas = Replicas()
    for number in range(3):
        name = replicas.register(number, "x" * 256, 0, NAMESPACE, instance=f"{number}" * 64)
        assert len(name) <= 256
    assert len(replicas.connected()) == 3

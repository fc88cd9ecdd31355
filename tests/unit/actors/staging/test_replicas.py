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

BAD_SIZES = (0, -1, "32", 2**31, 2**64 - 1, None, 1.5, b"32")
NAMES = [str(number) for number in range(257)]


@pytest.fixture
def replicas() -> Replicas:
    """Replica `one` is connected through connection 1."""
    made = Replicas()
    made.register(1, "one", 0, NAMESPACE)
    return made


def test_another_layout_under_the_same_model_key_is_refused(replicas):
    said = r"'llama-3@1'.*kv_dtype 'float8' here, 'bfloat16'"
    for layout in (OTHER_LAYOUT, replace(OTHER_LAYOUT, weights="3")):
        with pytest.raises(LayoutMismatch, match=said):
            replicas.register(2, "two", 0, layout)
    assert len(replicas.status()) == 1
    replicas.disconnect(1)
    replicas.register(2, "two", 0, OTHER_LAYOUT)


def test_other_ranks_are_welcome_if_they_do_not_mean_other_bytes_by_a_key(replicas):
    others = {
        "the same layout": NAMESPACE,
        "other parallelism": replace(OTHER_LAYOUT, tp_layout="tp4"),
        "other weights": replace(NAMESPACE, weights="2"),
        "fingerprinted": replace(NAMESPACE, model="sha256:ab"),
        "of that name": replace(OTHER_LAYOUT, model="sha256:ab"),
    }
    for connection, (replica, namespace) in enumerate(others.items(), 2):
        replicas.register(connection, replica, 0, namespace)
    assert replicas.connected() == [("one", 0), *((replica, 0) for replica in others)]
    for connection in range(2, 7):
        replicas.disconnect(connection)
    replicas.register(2, "one", 1, OTHER_LAYOUT)


def test_figures_are_taken_from_the_registered_connection_only(replicas):
    origin = Origin(replica="one", rank=0, namespace=NAMESPACE)
    assert replicas.report(1, "one", 0, {"hits": 3}) == origin
    assert not replicas.report(2, "one", 0, {"hits": 9})
    assert not replicas.report(1, "two", 0, {"hits": 9})
    assert replicas.status()[0]["counters"] == {"hits": 3}


def test_absurd_ranks_and_figures_are_refused_before_anybody_asks_for_the_status(replicas):
    for rank in (("", 0), ("x" * 257, 0), (7, 0), (["x"], 0), ("x", -1), ("x", "0")):
        with pytest.raises(ConfigError):
            replicas.register(2, *rank, NAMESPACE)
        with pytest.raises(ConfigError):
            replicas.report(2, *rank, {})
    for counters in (5, "ab", ["a"], {"a": "b"}, {7: 7}, {"x" * 257: 1}, dict.fromkeys(NAMES, 1)):
        with pytest.raises(ConfigError):
            replicas.report(1, "one", 0, counters)
    bad_sizes = [{"tokens_per_block": bad} for bad in BAD_SIZES]
    for wrong in ({"model": 5}, {"kv_dtype": None}, {"num_layers": None}, *bad_sizes):
        with pytest.raises(ConfigError):
            replicas.register(2, "two", 0, replace(NAMESPACE, **wrong))
    with pytest.raises(ConfigError, match="exceeds the 65536"):  # too long to be passed on
        replicas.register(2, "two", 0, replace(NAMESPACE, model="m", overrides="x" * 70_000))
    assert len(replicas.status()) == 1


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("wanted", [5, "ab", [5], [[0]], [[-1, None]], [[1024, None]], [[True, None]]]),
        ("wanted", [[[0, 0]], [[0, "all"]], [[0, None]] * 257]),
        ("num_ranks", [0, 4097, "2", True]),
        ("holder", [5, ["arena", 5], [5, 5, 5], ["arena", -1, 5]]),
        ("adapters", [5, "x" * 70_000]),
    ],
)
def test_absurd_readings_are_refused(field, values):
    for value in values:
        with pytest.raises(ConfigError):
            read_reader(NAMESPACE, **{field: value})


def test_of_too_many_ranks_the_oldest_that_hung_up_goes(replicas, monkeypatch):
    monkeypatch.setattr(replicas_module, "_RANKS_MAX", 3)
    for connection, name in enumerate(["two", "three", "four", "five"], 2):
        replicas.register(connection, name, 0, NAMESPACE)
        if name == "three":
            replicas.disconnect(2)
    assert [entry["replica"] for entry in replicas.status()] == ["three", "four", "five"]


# -- how ranks read -------------------------------------------------------------------------------


def test_what_a_rank_says_of_its_reading_is_kept_while_it_is_here(replicas):
    said = {"num_ranks": 2, "adapters": "rank 8", "served": "Qwen3-8B"}
    reader = read_reader(NAMESPACE, wanted=[[0, None], [3, 4]], holder=["arena", 5, 7], **said)
    assert reader == Reader(
        namespace=NAMESPACE,
        part_requests=(PartRequest(0), PartRequest(3, 4)),
        arena_id="arena",
        member=Membership(5, 7),
        **said,
    )
    replicas.register(2, "two", 1, reader)
    assert replicas.readers("two", [0, 1]) == {1: reader}
    assert [*replicas.namespaces().values()] == [{**NAMESPACE.to_wire(), "served": "Qwen3-8B"}]
    replicas.disconnect(2)
    assert replicas.reader("two", 1) is None
    assert replicas.connected() == [("one", 0)]


def test_a_rank_speaks_for_all_or_for_itself():
    assert Reader(namespace=NAMESPACE).ranks(3) == [3]
    assert Reader(namespace=NAMESPACE, num_ranks=2).ranks(1) == [0, 1]


# -- ranks that have ended -------------------------------------------------------------------------


class Visitors(Replicas):
    """Engines that come, count and go; the time is told."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(clock=lambda: self.now)

    def visit(self, name: str, *, for_s: float = 0.0, **namespace: Any) -> None:
        self.register(1, name, 0, replace(NAMESPACE, **namespace))
        counters = {"requests": 2, "prompt_tokens": 64, "uptime_s": 4, f"odd-{name}": 1}
        self.report(1, name, 0, counters)
        self.now += for_s
        self.disconnect(1)

    def add_up_at(self, now: float) -> list[dict[str, Any]]:
        self.now = now
        self.add_up()
        return self.status()

    def total(self, name: str) -> int:
        listed = sum(one["counters"].get(name, 0) for one in self.status())
        return int(listed + self.ended()["counters"].get(name, 0))


@pytest.fixture
def visitors() -> Visitors:
    return Visitors()


def test_of_hundreds_of_engines_that_come_and_go_few_are_listed_and_all_are_counted(visitors):
    visitors.register(10**6, "stays", 0, NAMESPACE)
    for number in range(1, 500):
        visitors.visit(f"pod-{number}", for_s=4.0, model=f"m{number}")
        assert len(visitors.add_up_at(visitors.now)) <= 1 + ENDED_MAX
        assert visitors.total("requests") == 2 * number
    assert visitors.total("prompt_tokens") == 64 * 499
    assert visitors.connected() == [("stays", 0)]
    assert "uptime_s" not in visitors.ended()["counters"]
    assert len(visitors.ended()["counters"]) == 256, "no more than a rank may have"
    visitors.add_up_at(visitors.now + ENDED_S)
    assert len(visitors.namespaces()) == 1 + 64, "of those that ended the last ones"


@pytest.mark.parametrize("says_so", [True, False])
def test_who_has_ended_reports_no_more_and_is_listed_for_a_while(visitors, says_so):
    visitors.register(1, "pod-1", 0, NAMESPACE)
    visitors.now = 5000.0
    assert visitors.report(1, "pod-1", 0, {"hits": 3}, leaving=says_so)
    if not says_so:
        visitors.disconnect(1)
    assert not visitors.report(1, "pod-1", 0, {"hits": 4})
    (entry,) = visitors.add_up_at(5000.0 + ENDED_S - 1)
    assert (entry["connected"], entry["counters"]) == (False, {"hits": 3})
    assert namespace_id(NAMESPACE.digest()) in visitors.numbers(), "its blocks may be there"
    assert visitors.namespace_of("pod-1", 0) == NAMESPACE
    assert visitors.add_up_at(5000.0 + ENDED_S) == []
    assert visitors.namespace_of("pod-1", 0) is None
    assert visitors.ended()["ranks"] == 1
    told = {entry["namespace"]: {**NAMESPACE.to_wire(), "served": ""}}
    assert visitors.namespaces() == told, "its blocks may still be there"


def test_of_many_that_lose_their_connection_at_once_all_may_come_back(visitors):
    for number in range(100):
        visitors.visit(f"engine-{number}")
    assert len(visitors.add_up_at(BACK_S - 1)) == 100
    assert len(visitors.add_up_at(BACK_S)) == ENDED_MAX


def of_two(rank: int) -> Reader:
    """Return a rank whose own parts are those of two layer groups, of 128 bytes each."""
    parts = (PartRequest(rank), PartRequest(2 + rank))
    namespace = replace(NAMESPACE, num_parts=4, part_bytes=256)
    return Reader(namespace=namespace, part_requests=parts, num_ranks=2)


@pytest.mark.parametrize(
    ("rank", "stored_by", "parts", "part_bytes"),
    [(0, 1, [0, 1], 256), (1, 1, [0, 1], 256), (1, 4, [2, 3, 6, 7], 64), (0, 2, [0, 2], 128)],
)
def test_a_rank_of_two_reads_parts_of_other_sizes(rank, stored_by, parts, part_bytes):
    resliced = of_two(rank).resliced(stored_by)
    assert [one.part for one in resliced.part_requests] == parts
    assert resliced.part_bytes == part_bytes


def test_sizes_that_do_not_divide_or_are_too_many_are_refused():
    for stored_by in (3, PARTS_MAX):
        with pytest.raises(ConfigError, match="update the engine's kvray"):
            of_two(1).resliced(stored_by)


def test_a_rank_is_told_of_its_weights_until_it_has_carried_that_out_or_is_another(replicas):
    order = replicas.order_weights("one", "2")
    assert order.waiting == {0}
    for done in ("", "an older one", ""):
        assert replicas.weights_order("one", 0, done) == [order.number, "2"]
    replicas.register(1, "one", 0, replace(NAMESPACE, weights="2"))  # it goes by it
    assert replicas.weights_order("one", 0, order.number) is None
    assert not order.waiting
    order = replicas.order_weights("one", "3")
    replicas.register(9, "one", 0, NAMESPACE)  # the engine was started again
    assert replicas.weights_order("one", 0, "") is None
    assert order.waiting == {0}, "it has not said so"


def test_of_two_orders_the_later_one_counts(replicas):
    first, second = replicas.order_weights("one", "2"), replicas.order_weights("one", None)
    assert replicas.weights_order("one", 0, first.number) == [second.number, None]
    replicas.call_off(first)
    assert replicas.weights_order("one", 0, "") == [second.number, None]
    assert first.waiting == {0}
    replicas.call_off(second)
    assert replicas.weights_order("one", 0, "") is None


def test_an_instance_that_connects_again_keeps_its_name_and_another_gets_it_later():
    replicas = Replicas()
    for connection in (1, 2):
        assert replicas.register(connection, "chat", 0, NAMESPACE, instance="aa11") == "chat"
    other = {"reads": NAMESPACE, "instance": "bb22"}
    assert replicas.register(3, "chat", 1, **other) == "chat", "another rank"
    assert replicas.report(1, "chat", 0, {}) is None
    for connection in (1, 2):
        assert replicas.register(3, "chat", 0, **other) == "chat-bb22"
        replicas.disconnect(connection)
    assert replicas.register(3, "chat", 0, **other) == "chat"


def test_the_name_of_a_second_instance_is_never_too_long():
    replicas = Replicas()
    for number in range(3):
        name = replicas.register(number, "x" * 256, 0, NAMESPACE, instance=f"{number}" * 64)
        assert len(name) <= 256
    assert len(replicas.connected()) == 3


def test_a_block_takes_a_slot_for_each_of_its_parts(replicas):
    wanted = [[0, None], [1, None, 100]]
    replicas.register(1, "r", 0, read_reader(NAMESPACE, wanted=wanted))
    of_one = replicas.reader("r", 0).part_bytes
    assert replicas.block_bytes("r", lambda size: size) == of_one + 100
    assert replicas.block_bytes("r", lambda size: 4096) == 2 * 4096

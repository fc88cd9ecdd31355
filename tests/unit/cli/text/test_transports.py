from typing import Any

import pytest

from kvray.cli.text.transports import choose, node_links

NO_NIXL = {"available": False, "reason": "NIXL is not installed"}


def mover(name: str, **transports: dict[str, Any]) -> dict[str, Any]:
    return {"mover": f"kvray-mover-{name}", "state": "serving", "transports": transports}


def has(**figures: Any) -> dict[str, Any]:
    return {"available": True, **figures}


def test_the_first_transport_that_both_ends_have_is_taken() -> None:
    ends = [mover(name, nixl=has(rdma=True), object_ref=has()) for name in "ab"]

    assert choose("a", ends[0], "b", ends[1]) == ("nixl", "both have it; RDMA")


def test_it_says_who_lacks_the_better_one() -> None:
    sender = mover("a", nixl=NO_NIXL, object_ref=has())
    receiver = mover("b", nixl=has(rdma=False), object_ref=has())

    assert choose("a", sender, "b", receiver) == (
        "object_ref",
        "a has no nixl: NIXL is not installed",
    )


def test_without_rdma_at_one_end_it_is_tcp() -> None:
    ends = mover("a", nixl=has(rdma=True)), mover("b", nixl=has(rdma=False))

    assert choose("a", ends[0], "b", ends[1]) == ("nixl", "both have it; TCP: no RDMA device")


def test_a_transport_that_keeps_failing_between_them_is_passed_over() -> None:
    sender, receiver = (mover(name, nixl=has(), object_ref=has()) for name in "ab")
    way = {
        "source": "kvray-mover-a",
        "transport": "nixl",
        "left_out": True,
        "failures": 2,
        "error": "A push did not end in time.",
    }
    receiver["failing_links"] = [way]

    transport, why = choose("a", sender, "b", receiver)
    assert transport == "object_ref"
    assert why == "nixl keeps failing from a: A push did not end in time."

    receiver["failing_links"] = [{**way, "left_out": False}]
    assert choose("a", sender, "b", receiver)[0] == "nixl"
    receiver["failing_links"] = [{**way, "source": "kvray-mover-c"}]
    assert choose("a", sender, "b", receiver)[0] == "nixl"


def test_if_nothing_else_is_there_it_is_tried_all_the_same() -> None:
    sender, receiver = (mover(name, nixl=has()) for name in "ab")
    receiver["failing_links"] = [
        {"source": "kvray-mover-a", "transport": "nixl", "left_out": True, "error": "It broke."}
    ]

    assert choose("a", sender, "b", receiver) == ("nixl", "nixl keeps failing from a: It broke.")


@pytest.mark.parametrize("end", ["a", "b"])
def test_a_mover_that_does_not_serve_moves_nothing(end: str) -> None:
    ends = {name: mover(name, nixl=has()) for name in "ab"}
    ends[end] = {"mover": end, "state": "unreachable", "message": "It did not answer."}

    transport, why = choose("a", ends["a"], "b", ends["b"])

    assert transport is None
    assert why == f"the mover of {end} is unreachable: It did not answer."


def test_two_movers_without_a_common_transport_say_so() -> None:
    transport, why = choose("a", mover("a", nixl=has()), "b", mover("b", object_ref=has()))

    assert transport is None
    assert why == "a has no object_ref: not configured"


def test_each_way_has_what_its_target_measured() -> None:
    peer = {
        "peer": "kvray-mover-a",
        "bytes_per_s": 5.0,
        "breaker": "open",
        "error": "It did not answer.",
    }
    lookup = {"peer": "kvray-lookup", "bytes_per_s": None, "breaker": "closed", "error": ""}
    found = {
        "shards": [
            {"shard": "kvray-shard-a", "staging": {"peers": []}},
            {"shard": "kvray-shard-b", "staging": {"peers": [lookup, peer]}},
        ],
        "movers": [mover("a", nixl=has()), mover("b", nixl=has())],
    }

    made = {(link.source, link.target): link for link in node_links(found)}

    assert made.keys() == {("a", "b"), ("b", "a")}
    assert (made["a", "b"].bytes_per_s, made["a", "b"].breaker) == (5.0, "open")
    assert (made["b", "a"].bytes_per_s, made["b", "a"].breaker) == (None, "closed")


def test_a_tier_of_one_node_has_no_ways() -> None:
    assert (
        node_links({"shards": [{"shard": "kvray-shard-a", "state": "serving"}], "movers": []}) == []
    )

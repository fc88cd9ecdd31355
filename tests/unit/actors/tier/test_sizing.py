"""The curves of several nodes as one."""

from typing import Any

import pytest

from kvray.actors.tier.sizing import combined, found_with

SIZES = [10, 20, 40, 80]


def node(name: str, scale: int = 1, **changes: Any) -> dict[str, Any]:
    curve = {
        "num_tokens": 1000,
        "sampled_blocks": 500,
        "rate": 0.5,
        "own": 0.1,
        "host": [0.0, 0.1, 0.2, 0.3],
        "disk": [0.2, 0.1, 0.0, 0.0],
        "remote": [0.0, 0.0, 0.0, 0.0],
        "error": [0.03, 0.03, 0.03, 0.03],
        "measured": 0.3,
        "predicted": 0.3,
    }
    return {
        "shard": name,
        "namespaces": {"3f0a91c2": {"model": "sha256:ab", "served": "m"}},
        "traffic": {
            "host_bytes": 40 * scale,
            "disk_bytes": 100,
            "sizes": [size * scale for size in SIZES],
            "seconds": 10.0,
            "distinct_bytes": 70,
            "age_s": 5.0,
            "lost_prompts": 1,
            "namespaces": {"3f0a91c2": curve | changes},
        },
    }


def test_nodes_add_up_by_what_they_see_in_a_second():
    other = node("b", 2, num_tokens=3000, own=0.3, host=[0.4] * 4, error=[0.04] * 4)
    found = combined([node("a"), other, {"shard": "c", "state": "preparing"}])
    (entry,) = found["namespaces"]
    assert (found["nodes"], found["nodes_with_curve"], found["lost_prompts"]) == (2, 2, 2)
    assert (entry["served"], entry["tokens_per_s"]) == ("m", 400.0)
    assert (entry["host_bytes"], entry["disk_bytes"]) == (120, 200)
    assert entry["sizes"] == [30, 60, 120, 240]
    assert entry["own"] == pytest.approx(0.25)
    assert entry["host"] == pytest.approx([0.3, 0.325, 0.35, 0.375])
    assert entry["error"] == pytest.approx([((0.03 / 4) ** 2 + 0.03**2) ** 0.5] * 4, abs=1e-4)


def test_a_node_without_a_curve_is_named_and_not_counted():
    silent = {"shard": "b", "traffic": {"namespaces": {}, "age_s": None, "lost_prompts": 7}}
    found = combined([node("a"), silent])
    assert (found["nodes"], found["nodes_with_curve"], found["lost_prompts"]) == (2, 1, 8)
    assert found["namespaces"][0]["sizes"] == SIZES
    assert combined([silent])["namespaces"] == []
    assert combined([])["age_s"] is None


@pytest.mark.parametrize("measured", [0.2, 0.35, 0.37, 0.29])
def test_the_error_is_that_of_today_and_far_off_nothing_is_sure(measured):
    (entry,) = combined([node("a"), node("b", measured=measured)])["namespaces"]
    assert entry["measured"] == pytest.approx((0.3 + measured) / 2)
    off = abs(entry["predicted"] - entry["measured"])
    assert 2 * min(entry["error"]) >= off - 1e-6
    assert entry["is_sure"] is (off <= 0.03)


def test_the_least_memory_worth_running_lies_where_a_point_comes_from_it():
    def worth(*host: float) -> int | None:
        (entry,) = combined([node("a", host=list(host))])["namespaces"]
        found: int | None = entry["worth_from_bytes"]
        return found

    assert worth(0.0, 0.02, 0.1, 0.2) == 14, "halfway between 10 and 20 by the logarithm"
    assert worth(0.0, 0.01, 0.1, 0.2) == 20
    assert worth(0.5, 0.6, 0.7, 0.8) == 0
    assert worth(0.0, 0.0, 0.001, 0.002) is None


def test_between_two_points_the_curve_is_a_line_over_the_logarithm():
    (entry,) = combined([node("a")])["namespaces"]
    middle = found_with(entry, 40 * 2**0.5)
    assert middle is not None
    assert middle["host"] == pytest.approx(0.25)
    first = {"host": 0.0, "disk": 0.2, "remote": 0.0, "error": 0.03}
    assert found_with(entry, 10) == pytest.approx(first)
    assert found_with(entry, 80) == pytest.approx({**first, "host": 0.3, "disk": 0.0})
    assert found_with(entry, 9) is None
    assert found_with(entry, 81) is None

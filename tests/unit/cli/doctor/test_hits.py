"""Why the hit rate is what it is, from what `kvray status` says."""

from typing import Any

import pytest

from kvray.cli.doctor.finding import Finding
from kvray.cli.doctor.tier import hit_findings
from kvray.trace.reasons import COUNTED


def status_with(*replicas: dict[str, Any], **arena: int) -> dict[str, Any]:
    return {"shards": [{"shard": "a", "arena": {"dropped": 0, **arena}, "replicas": [*replicas]}]}


def replica(name: str = "r-0", namespace: str = "01", **counters: int) -> dict[str, Any]:
    return {
        "replica": name,
        "rank": 0,
        "connected": True,
        "namespace": namespace,
        "counters": counters,
    }


def found(*replicas: dict[str, Any], **arena: int) -> dict[str, Finding]:
    return {one.check: one for one in hit_findings(status_with(*replicas, **arena))}


def test_tier_without_engines_says_how_to_connect_one() -> None:
    (one,) = hit_findings(status_with())
    assert one.verdict == "hint"
    assert "kvray connector-config" in one.fix


def test_engines_that_have_all_gone_are_a_hint() -> None:
    gone = {**replica(requests=1, prompt_tokens=64), "connected": False}
    assert found(gone)["replicas"].verdict == "hint"


def test_engines_that_were_asked_for_nothing_are_a_hint() -> None:
    assert "none has had a request" in found(replica(requests=0))["requests"].says


def test_requests_that_all_went_past_the_cache_are_a_fault() -> None:
    assert found(replica(requests=0, bypassed_requests=7))["requests"].verdict == "fault"


def test_hit_rate_is_of_all_prompt_tokens_by_where_they_came_from() -> None:
    counters = {"requests": 2, "prompt_tokens": 172, "local_tokens": 160}
    says = "172 prompt tokens: own pool 93.0%, host 0.0%, disk 0.0%, remote 0.0%, computed 7.0%"
    assert found(replica(**counters))["hit rate"].says == says


def test_a_tensor_cache_is_asked_for_something_too() -> None:
    counters = {"requests": 3, "prompt_tokens": 1408, "hit_tokens": 1408}
    assert "requests" not in found(replica(**counters))


def test_replicas_that_share_no_namespace_are_named() -> None:
    counters = {"requests": 1, "prompt_tokens": 64}
    apart = found(replica("a", "01", **counters), replica("b", "02", **counters))
    assert apart["namespaces"].verdict == "hint"
    together = found(replica("a", "01", **counters), replica("b", "01", **counters))
    assert "namespaces" not in together


@pytest.mark.parametrize("reason", sorted(COUNTED))
def test_each_reason_of_missed_tokens_has_its_fix(reason: str) -> None:
    counters = {"requests": 1, "prompt_tokens": 640, f"miss_tokens_{reason}": 608}
    one = found(replica(**counters))[f"missed: {reason}"]
    assert one.says.startswith("608 tokens: ")
    assert one.fix


def test_reasons_of_few_tokens_explain_nothing() -> None:
    counters = {"requests": 1, "prompt_tokens": 1000}
    missed = {"miss_tokens_not_stored": 990, "miss_tokens_arena_busy": 10}
    shown = found(replica(**counters, **missed))
    assert "missed: not_stored" in shown
    assert "missed: arena_busy" not in shown


def test_blocks_that_were_not_stored_are_reported() -> None:
    counters = {"requests": 1, "prompt_tokens": 64}
    assert "arena.capacity" in found(replica(**counters), dropped=3)["saves"].fix
    assert "connector.saves_max" in found(replica(**counters, dropped_blocks=2))["saves"].fix
    reasons = {"dropped_blocks_no_room": 2, "dropped_blocks_too_slow": 3}
    said = found(replica(**counters, dropped_blocks=5, **reasons))["saves"].says
    assert said.endswith("5 blocks were not stored: 3 too_slow, 2 no_room")


def test_defects_inside_the_connector_are_reported() -> None:
    shown = found(replica(requests=1, prompt_tokens=64, errors=2))
    assert "log" in shown["errors"].fix

"""What the tier's parts and its counters say of themselves, as findings."""

from typing import Any
from unittest.mock import Mock

import pytest

from kvray.cli.doctor.command import _ask_tier
from kvray.cli.doctor.tier import Finding, fault, hit_findings, tier_findings
from kvray.config import KVRayConfig
from kvray.errors import ShardUnavailable
from kvray.trace.reasons import COUNTED
from tests.unit.cli.answers import ARENA, NVME, SERVING, mover, replica

GIB = 2**30


def found(*shards: dict[str, Any], movers: tuple[dict[str, Any], ...] = ()) -> dict[str, Finding]:
    status = {"lookup": {"keys": 7}, "shards": [*shards], "movers": [*movers]}
    return {one.check: one for one in tier_findings(status)}


def test_whole_tier_has_nothing_to_mend_and_one_without_shards_a_remedy():
    shown = found({**SERVING, "nvme": NVME})
    assert {one.verdict for one in shown.values()} == {"ok"}
    assert set(shown) == {"lookup", "shard aa", "disk aa"}
    assert "shard.resource" in found()["shards"].fix


def test_lookup_that_does_not_answer_is_a_fault_and_shards_are_told_all_the_same():
    silent = {"lookup": "kvray-lookup-1", "state": "unreachable", "message": "No answer in 2 s."}
    partly = {"keys": 7, "partitions": [{"lookup": "kvray-lookup", "keys": 7}, silent]}
    for lookup in (silent, partly):
        shown = [*tier_findings({"lookup": lookup, "shards": [SERVING]})]
        assert "ok" in {one.verdict for one in shown if one.check == "shard aa"}
        (fault,) = [one for one in shown if one.verdict == "fault"]
        assert (fault.check, fault.says) == ("kvray-lookup-1", "does not answer (No answer in 2 s)")
        assert "supervisor" in fault.fix


@pytest.mark.parametrize(
    ("error", "says", "fix"),
    [
        ("A is gone (late; last: refused); do this.", "A is gone (late; last: refused)", "do this"),
        ("There is no tier.", "There is no tier", "start the tier with `kvray up`"),
    ],
)
def test_a_tier_that_cannot_be_asked_is_a_fault_with_its_whole_reason(
    error, says, fix, monkeypatch
):
    monkeypatch.setattr("kvray.client.Client", Mock(side_effect=ShardUnavailable(error)))
    _, _, (finding,) = _ask_tier(KVRayConfig())
    assert finding == fault("Ray", says, fix)


def disk(**changes: Any) -> dict[str, Any]:
    return {**SERVING, "nvme": {**NVME, **changes}}


@pytest.mark.parametrize(
    ("shard", "check", "verdict", "words"),
    [
        ({"state": "preparing", "message": "Why."}, "shard", "hint", "Why"),
        ({"state": "starting", "message": "Why."}, "shard", "hint", "Why"),
        ({"state": "failed", "message": "Why."}, "shard", "fault", "Why"),
        ({"state": "unreachable", "message": "Why."}, "shard", "fault", "Why"),
        ({**SERVING, "arena": {**ARENA, "corrupt": 2}}, "shard", "hint", "kvray verify"),
        ({**SERVING, "staging": {"corrupt_blocks": 2}}, "shard", "hint", "test the network"),
        (disk(message="The disk failed."), "disk", "fault", "mend"),
        (disk(message="The disk failed.", state="out"), "disk", "fault", "by itself"),
        (disk(segments_without_room=1), "disk", "hint", "free room"),
        (disk(write_budget_bytes=0), "disk", "hint", "nvme.write_gib_per_day"),
        (disk(is_direct=False), "disk", "hint", "ext4"),
    ],
)
def test_what_does_not_do_its_work_is_reported(shard, check, verdict, words):
    one = found({"shard": "kvray-shard-aa", **shard})[f"{check} aa"]
    assert one.verdict == verdict
    assert words in one.says + one.fix
    assert one.fix


NONE = "none of its memory is in huge pages"


@pytest.mark.parametrize(
    ("changes", "verdict", "says"),
    [
        ({}, "hint", NONE),
        ({"huge_bytes": 3 * GIB}, "hint", "75 % of its memory is in huge pages"),
        ({"huge_bytes": 4 * GIB, "command": None}, "ok", "its memory is in huge pages of 2MiB"),
        ({"huge_page_bytes": 0, "command": None}, "ok", "its memory is in small pages"),
        (
            {"numa_nodes": 4, "interleaved_nodes": 4},
            "hint",
            f"{NONE}, interleaved over 4 NUMA nodes",
        ),
        ({"numa_nodes": 4}, "hint", f"{NONE}, not interleaved over the 4 NUMA nodes"),
    ],
)
def test_an_arena_s_pages_are_told_with_the_command_for_larger_ones(changes, verdict, says):
    memory = {"mapped_bytes": 4 * GIB, "huge_bytes": 0, "huge_page_bytes": 2**21}
    memory |= {"numa_nodes": 1, "interleaved_nodes": 0}
    memory |= {"command": "mount -o remount,huge=advise /dev/shm", **changes}
    one = found({**SERVING, "memory": memory})["pages aa"]
    assert (one.verdict, one.says) == (verdict, says)
    command = "for pages of 2MiB run `mount -o remount,huge=advise /dev/shm` as root, then"
    assert one.fix == (f"{command} `kvray down` and `kvray up`" if verdict == "hint" else "")


def test_a_disk_that_was_hardly_meant_is_a_hint_and_of_unknown_pages_nothing_is_said():
    remark = "/nvme is on the root file system; mount one at nvme.dir."
    shard = {**disk(remarks=[remark]), "memory": {}}
    shown = [*tier_findings({"lookup": {"keys": 7}, "shards": [shard]})]
    (one,) = [one for one in shown if one.verdict == "hint"]
    assert (one.says, one.fix) == ("/nvme is on the root file system", "mount one at nvme.dir")
    assert "pages aa" not in {one.check for one in shown}


def test_nodes_between_which_nothing_can_be_moved_are_a_fault():
    nixl = {"available": True, "rdma": False}
    other = nixl | {"available": False, "reason": "no library; install it"}
    one, without = mover("aa", nixl=nixl), mover("bb", nixl=other)
    link = found(SERVING, movers=(one, without))["link aa > bb"]
    assert link.verdict == "fault"
    assert link.says == "no block can be moved: bb has no nixl: no library"
    assert "link aa > bb" not in found(SERVING, movers=(one, mover("bb", nixl=nixl)))


def hits_found(*replicas: dict[str, Any], **arena: int) -> dict[str, Finding]:
    shard = {"shard": "a", "arena": {"dropped": 0, **arena}, "replicas": [*replicas]}
    return {one.check: one for one in hit_findings({"shards": [shard]})}


ASKED = {"requests": 1, "prompt_tokens": 64}


@pytest.mark.parametrize(
    ("replicas", "check", "verdict", "words"),
    [
        ([], "replicas", "hint", "no engine has registered"),
        ([replica(**ASKED, connected=False)], "replicas", "hint", "none is connected now"),
        ([replica(requests=0)], "requests", "hint", "none has had a request"),
        ([replica(requests=0, bypassed_requests=7)], "requests", "fault", "bypassed the cache"),
        (
            [replica(requests=9, prompt_tokens=640, bypassed_requests=7)],
            *("requests", "hint", "7 requests bypassed the cache"),
        ),
        (
            [replica(requests=0, bypassed_requests=7, tenantless_requests=7)],
            *("requests", "fault", "they name no tenant"),
        ),
        ([replica(**ASKED)], "prompts", "hint", "64 prompt tokens are in no whole block"),
        ([replica(**ASKED, errors=2)], "errors", "hint", "had 2 errors"),
        ([replica(requests=0, errors=2)], "errors", "hint", "had 2 errors"),
        (
            [replica("a", **ASKED), replica("b", **ASKED, namespace="02")],
            *("namespaces", "hint", "unless they differ in their number of ranks alone"),
        ),
    ],
)
def test_engines_whose_requests_find_nothing_are_reported(replicas, check, verdict, words):
    finding = hits_found(*replicas)[check]
    assert finding.verdict == verdict
    assert words in finding.says
    assert finding.fix


def test_hit_rate_is_of_all_prompt_tokens_by_where_they_came_from():
    counters = {"requests": 2, "prompt_tokens": 172, "local_tokens": 160}
    says = "172 prompt tokens: own pool 93.0%, host 0.0%, disk 0.0%, remote 0.0%, computed 7.0%"
    assert hits_found(replica(**counters))["hit rate"].says == says


def test_who_only_stores_or_asks_for_tensors_or_shares_its_namespace_gets_no_advice():
    for connected in (True, False):
        assert not hits_found(replica(requests=0, stored_tokens=64, connected=connected))
    counters = {"requests": 3, "prompt_tokens": 1408, "hit_tokens": 1408}
    assert "requests" not in hits_found(replica(**counters))
    assert "namespaces" not in hits_found(replica("a", **ASKED), replica("b", **ASKED))
    assert "prompts" not in hits_found(replica(**counters))
    unnamed = replica("b", **ASKED, namespace="02", is_named=False)
    assert "namespaces" not in hits_found(replica("a", **ASKED), replica("c", **ASKED), unnamed)
    assert "namespaces" not in hits_found(replica("a", **ASKED), unnamed)


@pytest.mark.parametrize("reason", sorted(COUNTED))
def test_each_reason_of_missed_tokens_has_its_fix_but_of_few_tokens_there_is_none(reason):
    other = "miss_tokens_not_stored" if reason != "not_stored" else "miss_tokens_arena_busy"
    missed = {f"miss_tokens_{reason}": 990, other: 10}
    shown = hits_found(replica(requests=1, prompt_tokens=1000, **missed))
    assert shown[f"missed: {reason}"].says.startswith("990 tokens: ")
    assert shown[f"missed: {reason}"].fix
    assert sum(check.startswith("missed: ") for check in shown) == 1


def test_blocks_that_were_not_stored_are_reported():
    full = hits_found(replica(**ASKED), dropped=3)["saves"]
    assert "or a block before them was not stored" in full.says
    assert "arena.capacity" in full.fix
    lost = hits_found(replica(requests=0, stored_tokens=64, dropped_tokens=32))["saves"]
    assert lost.says.startswith("32 tokens that a TensorCache was given")
    reasons = {"dropped_blocks_no_room": 2, "dropped_blocks_too_slow": 3}
    one = hits_found(replica(**ASKED, dropped_blocks=5, **reasons))["saves"]
    assert "connector.saves_max" in one.fix
    assert one.says.endswith("5 blocks were not stored: 3 too_slow, 2 no_room")

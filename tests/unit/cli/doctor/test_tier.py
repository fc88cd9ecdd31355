"""What the tier's parts say of themselves, as findings."""

from typing import Any

import pytest

from kvray.cli.doctor.finding import Finding
from kvray.cli.doctor.tier import tier_findings

ARENA = {"capacity_bytes": 2**30, "blocks": 12, "leased_blocks": 2, "corrupt": 0}
GIB = 2**30
NVME = {
    "file_bytes": 2**30,
    "message": "",
    "segments_without_room": 0,
    "write_budget_bytes": None,
    "is_direct": True,
    "corrupt": 0,
}
SERVING = {"shard": "kvray-shard-aa", "state": "serving", "arena": ARENA}


def found(*shards: dict[str, Any], movers: tuple[dict[str, Any], ...] = ()) -> dict[str, Finding]:
    status = {"lookup": {"keys": 7}, "shards": [*shards], "movers": [*movers]}
    return {one.check: one for one in tier_findings(status)}


def test_whole_tier_has_nothing_to_mend() -> None:
    shown = found({**SERVING, "nvme": NVME})
    assert {one.verdict for one in shown.values()} == {"ok"}
    assert set(shown) == {"lookup", "shard aa", "disk aa"}


def test_partition_of_the_lookup_that_does_not_answer_is_a_fault() -> None:
    silent = {"lookup": "kvray-lookup-1", "state": "unreachable", "message": "No answer in 2 s."}
    lookup = {"keys": 7, "partitions": [{"lookup": "kvray-lookup", "keys": 7}, silent]}
    shown = [*tier_findings({"lookup": lookup, "shards": [SERVING], "movers": []})]
    (fault,) = [one for one in shown if one.verdict == "fault"]
    assert (fault.check, fault.says) == ("kvray-lookup-1", "does not answer (No answer in 2 s)")
    assert "supervisor" in fault.fix


def test_lookup_that_does_not_answer_is_a_fault_and_shards_are_told_all_the_same() -> None:
    silent = {"lookup": "kvray-lookup", "state": "unreachable", "message": "No answer in 2 s."}
    shown = {one.check: one for one in tier_findings({"lookup": silent, "shards": [SERVING]})}
    assert {name: one.verdict for name, one in shown.items()} == {
        "kvray-lookup": "fault",
        "shard aa": "ok",
    }


def test_tier_without_shards_is_a_fault() -> None:
    assert "shard.resource" in found()["shards"].fix


@pytest.mark.parametrize(
    ("state", "verdict"),
    [("preparing", "hint"), ("starting", "hint"), ("failed", "fault"), ("unreachable", "fault")],
)
def test_shard_that_does_not_serve_is_reported(state: str, verdict: str) -> None:
    one = found({"shard": "kvray-shard-aa", "state": state, "message": "Why."})["shard aa"]
    assert one.verdict == verdict
    assert "Why" in one.says
    assert one.fix


def test_corrupt_blocks_are_reported() -> None:
    shown = found({**SERVING, "arena": {**ARENA, "corrupt": 2}})
    assert "kvray verify" in shown["shard aa"].fix


def pages(**changes: Any) -> Finding:
    memory = {
        "mapped_bytes": 4 * GIB,
        "huge_bytes": 0,
        "huge_page_bytes": 2**21,
        "numa_nodes": 1,
        "interleaved_nodes": 0,
        "command": "mount -o remount,huge=advise /dev/shm",
    }
    return found({**SERVING, "memory": {**memory, **changes}})["pages aa"]


def test_an_arena_in_small_pages_is_told_the_command() -> None:
    one = pages()
    assert (one.verdict, one.says) == ("hint", "none of its memory is in huge pages")
    assert one.fix == (
        "for pages of 2MiB run `mount -o remount,huge=advise /dev/shm` as root, then `kvray down`"
        " and `kvray up`"
    )


def test_an_arena_in_huge_pages_needs_no_command() -> None:
    one = pages(huge_bytes=4 * GIB, command=None)
    assert (one.verdict, one.says) == ("ok", "its memory is in huge pages of 2MiB")


def test_an_arena_partly_in_huge_pages_says_how_much() -> None:
    assert pages(huge_bytes=3 * GIB).says == "75 % of its memory is in huge pages"


def test_where_there_are_no_huge_pages_none_are_offered() -> None:
    one = pages(huge_page_bytes=0, command=None)
    assert (one.verdict, one.says) == ("ok", "its memory is in small pages")


def test_several_numa_nodes_are_named() -> None:
    said = pages(numa_nodes=4, interleaved_nodes=4).says
    assert said.endswith("pages, interleaved over 4 NUMA nodes")
    assert pages(numa_nodes=4).says.endswith("pages, not interleaved over the 4 NUMA nodes")


def test_a_shard_that_does_not_know_its_pages_says_nothing() -> None:
    assert "pages aa" not in found({**SERVING, "memory": {}})


@pytest.mark.parametrize(
    ("changed", "verdict", "word"),
    [
        ({"message": "The disk failed."}, "fault", "mend"),
        ({"message": "The disk failed.", "state": "out"}, "fault", "by itself"),
        ({"segments_without_room": 1}, "hint", "free room"),
        ({"write_budget_bytes": 0}, "hint", "nvme.write_gib_per_day"),
        ({"is_direct": False}, "hint", "ext4"),
    ],
)
def test_disk_that_does_not_do_its_work_is_reported(
    changed: dict[str, Any], verdict: str, word: str
) -> None:
    one = found({**SERVING, "nvme": {**NVME, **changed}})["disk aa"]
    assert one.verdict == verdict
    assert word in one.fix


def test_a_disk_that_was_hardly_meant_is_a_hint() -> None:
    remark = "/nvme is on the root file system; mount one at nvme.dir."
    status = {"lookup": {"keys": 7}, "movers": []}
    shard = {**SERVING, "nvme": {**NVME, "remarks": [remark]}}
    hints = [one for one in tier_findings({**status, "shards": [shard]}) if one.verdict == "hint"]
    assert [(one.says, one.fix) for one in hints] == [
        ("/nvme is on the root file system", "mount one at nvme.dir")
    ]


def mover(node: str, *, available: bool = True) -> dict[str, Any]:
    transport = {"available": available, "reason": "no library", "rdma": False}
    return {"mover": f"kvray-mover-{node}", "state": "serving", "transports": {"nixl": transport}}


def test_nodes_between_which_nothing_can_be_moved_are_a_fault() -> None:
    shown = found(SERVING, movers=(mover("aa"), mover("bb", available=False)))
    assert shown["link aa > bb"].verdict == "fault"
    assert "no library" in shown["link aa > bb"].says


def test_transport_between_two_nodes_is_named() -> None:
    shown = found(SERVING, movers=(mover("aa"), mover("bb")))
    assert shown["link aa > bb"].says == "nixl (both have it; TCP: no RDMA device)"

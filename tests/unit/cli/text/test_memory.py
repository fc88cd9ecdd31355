from typing import Any

from rich.console import Console

from kvray.cli.text.status import shares_report


def shard_of(*namespaces: tuple[str, int, int | None], over_quota: int = 0) -> dict[str, Any]:
    held = [
        {"namespace": name, "blocks": blocks, "bytes": blocks * 2**20, "quota_bytes": quota}
        for name, blocks, quota in namespaces
    ]
    arena = {"namespaces": held, "over_quota": over_quota}
    return {"shard": "kvray-shard-0123", "state": "serving", "arena": arena}


def lines_of(*shards: dict[str, Any]) -> list[str]:
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        for line in shares_report(list(shards)):
            console.print(line)
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_every_namespace_shows_what_it_has_and_may_have() -> None:
    lines = lines_of(shard_of(("12ab34cd", 3, 5 * 2**20), ("", 2, None), over_quota=7))
    assert "0123 12ab34cd 3 3MiB 5MiB" in lines
    assert "0123 not known 2 2MiB" in lines
    assert "7 blocks were evicted because their namespace was over its quota." in lines


def test_one_namespace_without_a_quota_needs_no_table() -> None:
    assert shares_report([shard_of(("12ab34cd", 3, None)), {"shard": "b"}]) == []
    assert len(shares_report([shard_of(("12ab34cd", 3, 2**30))])) == 1

"""What several shards have, as one list."""

from typing import Any

from kvray.cli.ls import namespaces, namespaces_table, prefixes


def shard(name: str, replica: str, hit: int) -> dict[str, Any]:
    counters = {"prompt_tokens": 100, "hit_tokens": hit}
    return {
        "shard": name,
        "namespaces": {"3f0a91c2": {"model": "key:m", "kv_dtype": "bf16"}},
        "replicas": [
            {
                "replica": replica,
                "rank": 0,
                "connected": True,
                "namespace": "3f0a91c2",
                "counters": counters,
            }
        ],
    }


def test_blocks_and_hits_of_all_nodes_are_summed_by_namespace() -> None:
    shards = [shard("a", "one", 10), shard("b", "two", 50), {"shard": "c", "state": "preparing"}]
    contents = {
        "a": {"namespaces": {"3f0a91c2": {"host_blocks": 2, "host_bytes": 20}}},
        "b": {
            "namespaces": {
                "3f0a91c2": {"host_blocks": 1, "host_bytes": 10},
                "00ff00ff": {"nvme_blocks": 9, "nvme_bytes": 90},
            }
        },
    }
    other, mine = namespaces(shards, contents)
    assert (other["namespace"], other["nvme_bytes"], other["replicas"]) == ("00ff00ff", 90, [])
    assert (mine["host_blocks"], mine["host_bytes"], mine["hit_tokens"]) == (3, 30, 60)
    assert mine["replicas"] == ["one", "two"]
    assert namespaces_table([other, mine]).row_count == 2


def test_a_prefix_that_several_nodes_have_is_one() -> None:
    def one(key: str, uses: int, age: float | None) -> dict[str, Any]:
        return {"key": key, "num_blocks": 4, "uses": uses, "used_s_ago": age}

    contents = {
        "kvray-shard-a": {"prefixes": [one("aa", 3, 9.0), one("bb", 4, 1.0)]},
        "kvray-shard-b": {"prefixes": [one("aa", 2, 5.0), one("cc", 0, None)]},
    }
    first, second, third = prefixes(contents)
    assert first == {**one("aa", 5, 5.0), "nodes": ["a", "b"]}
    assert (second["key"], third["used_s_ago"]) == ("bb", None)

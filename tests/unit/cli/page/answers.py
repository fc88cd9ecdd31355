"""What a tier of two nodes answers, with names that would be markup, for the tests of the page."""

from typing import Any

NOW = 1_790_000_000.0
MARKUP = "<img src=x onerror=alert(1)>[bold]"
NVME = {
    "file_bytes": 2**30,
    "capacity_bytes": 2**32,
    "blocks": 70,
    "written_bytes": 0,
    "read_bytes": 0,
    "message": "",
    "segments_without_room": 0,
    "write_budget_bytes": None,
    "is_direct": True,
    "corrupt": 0,
}


CURVE = {
    "num_tokens": 60_000,
    "sampled_blocks": 900,
    "own": 0.1,
    "host": [0.05, 0.2, 0.33, 0.41, 0.45],
    "disk": [0.1, 0.08, 0.04, 0.02, 0.0],
    "error": [0.01] * 5,
}
TRAFFIC = {
    "namespaces": {"3f0a91c2": CURVE},
    "sizes": [2**32, 2**33, 2**34, 2**35, 2**36],
    "host_bytes": 2**34,
    "disk_bytes": 2**36,
    "distinct_bytes": 2**37,
    "seconds": 600.0,
    "age_s": 0.0,
    "lost_prompts": 0,
}


def shard(name: str, seconds: int = 0, **more: Any) -> dict[str, Any]:
    """Return the status of a shard whose replica has had 100 tokens a second, 60 from the host."""
    counters = {
        "prompt_tokens": 100 * seconds,
        "hit_tokens": 60 * seconds,
        "hit_tokens_from_host": 60 * seconds,
        "miss_tokens_not_stored": 40 * seconds,
    }
    replica = {
        "replica": f"on-{name} {MARKUP}",
        "rank": 0,
        "connected": True,
        "namespace": "3f0a91c2",
    }
    arena = {"resident_bytes": 2**20, "capacity_bytes": 2**22, "blocks": 12, "leased_blocks": 1}
    return {
        "shard": f"kvray-shard-{name}",
        "state": "serving",
        "arena": {**arena, "evicted": 3 * seconds, "corrupt": 0},
        "nvme": NVME,
        "traffic": TRAFFIC,
        "replicas": [{**replica, "counters": counters}],
        "namespaces": {"3f0a91c2": {"model": f"key:{MARKUP}", "tokens_per_block": 16}},
        **more,
    }


def silent(name: str) -> dict[str, Any]:
    """Return the status of a shard that does not answer."""
    return {"shard": f"kvray-shard-{name}", "state": "unreachable", "message": "No answer in 2 s."}


def mover(name: str) -> dict[str, Any]:
    ways = {"object_ref": {"available": True, "reason": ""}}
    return {"mover": f"kvray-mover-{name}", "state": "serving", "transports": ways}


def status(seconds: int = 0, **more: Any) -> dict[str, Any]:
    """Return what `Client.status` returns of the tier, so many seconds after its start."""
    return {
        "cluster_name": "prod",
        "lookup": {"keys": 1234},
        "shards": [shard("aa", seconds), shard("bb", seconds)],
        "movers": [mover("aa"), mover("bb")],
        **more,
    }


def contents() -> dict[str, Any]:
    sizes = {"host_blocks": 12, "host_bytes": 2**20, "nvme_blocks": 70, "nvme_bytes": 2**30}
    found = {f"kvray-shard-{name}": {"namespaces": {"3f0a91c2": sizes}} for name in ("aa", "bb")}
    prefix = {"key": "00ff00ff", "num_blocks": 9, "uses": 41, "used_s_ago": 2.0}
    hottest = {name: {**one, "prefixes": [prefix]} for name, one in found.items()}
    return {"contents": found, "prefixes": {"3f0a91c2": hottest}}


def requests(at: float = NOW) -> dict[str, Any]:
    ranges = [
        {"start": 0, "stop": 160, "what": "hit", "way": "nixl", "source": "kvray-shard-aa"},
        {"start": 160, "stop": 304, "what": "miss", "reason": "never_stored", "places": []},
        {"start": 304, "stop": 320, "what": "computed"},
    ]
    one = {
        "request_id": 7,
        "replica": f"on-bb {MARKUP}",
        "rank": 0,
        "at": at - 3,
        "namespace": "3f0a91c2",
        "num_tokens": 320,
        "own_tokens": 0,
        "hit_tokens": 160,
        "missed_tokens": 144,
        "reason": "never_stored",
        "stage_s": 0.012,
        "lease_s": 0.0004,
        "is_sampled": False,
        "log_since": at - 7200,
        "leaving": [],
        "ranges": ranges,
    }
    return {"requests": [one, {**one, "request_id": 6, "at": at - 9}], "silent": []}

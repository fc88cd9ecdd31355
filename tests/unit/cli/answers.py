"""What a tier answers, part by part, and a tier of two nodes with names that would be markup."""

from typing import Any

NOW = 1_790_000_000.0
MARKUP = "<img src=x onerror=alert(1)>[bold]"
NVME: dict[str, Any] = {"file_bytes": 2**30, "capacity_bytes": 2**32, "blocks": 70, "corrupt": 0}
NVME |= {"written_bytes": 0, "read_bytes": 0, "is_direct": True, "message": ""}
NVME |= {"segments_without_room": 0, "write_budget_bytes": None}
ARENA = {"resident_bytes": 3 * 2**20, "taken_bytes": 3 * 2**20, "capacity_bytes": 2**30}
ARENA |= {"blocks": 12, "leased_blocks": 2, "evicted": 5, "dropped": 1, "corrupt": 0}
SERVING = {"shard": "kvray-shard-aa", "state": "serving", "arena": ARENA}

CURVE: dict[str, Any] = {"num_tokens": 60_000, "sampled_blocks": 900, "own": 0.1}
CURVE |= {"host": [0.05, 0.2, 0.33, 0.41, 0.45], "disk": [0.1, 0.08, 0.04, 0.02, 0.0]}
CURVE |= {"remote": [0.0] * 5, "error": [0.01] * 5, "measured": 0.48, "predicted": 0.47}
TRAFFIC: dict[str, Any] = {"namespaces": {"3f0a91c2": CURVE}, "seconds": 600.0, "age_s": 0.0}
TRAFFIC |= {"sizes": [2**32, 2**33, 2**34, 2**35, 2**36], "lost_prompts": 0}
TRAFFIC |= {"host_bytes": 2**34, "disk_bytes": 2**36, "distinct_bytes": 2**37}


def replica(name: str = "r-1", **changes: Any) -> dict[str, Any]:
    """Return what a shard says of a rank; `changes` are fields, and all others counters."""
    fields = {"rank": 0, "connected": True, "namespace": "3f0a91c2", "is_named": True}
    given = {key: changes.pop(key) for key in [*changes] if key in fields}
    counters = changes.pop("counters", {}) | changes
    return fields | given | {"replica": name, "counters": counters}


def shard(name: str, seconds: int = 0, **more: Any) -> dict[str, Any]:
    """Return the status of a shard whose replica has had 100 tokens a second, 60 from the host."""
    counters = {
        "prompt_tokens": 100 * seconds,
        "hit_tokens": 60 * seconds,
        "hit_tokens_from_host": 60 * seconds,
        "miss_tokens_not_stored": 40 * seconds,
    }
    arena = {"taken_bytes": 2**20, "capacity_bytes": 2**22, "evicted": 3 * seconds}
    return {
        "shard": f"kvray-shard-{name}",
        "state": "serving",
        "arena": ARENA | arena,
        "nvme": NVME,
        "traffic": TRAFFIC,
        "replicas": [replica(f"on-{name} {MARKUP}", **counters)],
        "namespaces": {"3f0a91c2": {"model": f"key:{MARKUP}", "tokens_per_block": 16}},
        **more,
    }


def silent(name: str) -> dict[str, Any]:
    return {"shard": f"kvray-shard-{name}", "state": "unreachable", "message": "No answer in 2 s."}


def mover(name: str, **transports: dict[str, Any]) -> dict[str, Any]:
    return {"mover": f"kvray-mover-{name}", "state": "serving", "transports": transports}


def status(seconds: int = 0, **more: Any) -> dict[str, Any]:
    """Return what `Client.status` returns of the tier, so many seconds after its start."""
    return {
        "cluster_name": "prod",
        "lookup": {"keys": 1234},
        "shards": [shard("aa", seconds), shard("bb", seconds)],
        "movers": [mover(name, object_ref={"available": True}) for name in ("aa", "bb")],
        **more,
    }


def contents() -> dict[str, Any]:
    sizes = {"host_blocks": 12, "host_bytes": 2**20, "nvme_blocks": 70, "nvme_bytes": 2**30}
    found = {f"kvray-shard-{name}": {"namespaces": {"3f0a91c2": sizes}} for name in ("aa", "bb")}
    prefix = {"key": "00ff00ff", "num_blocks": 9, "uses": 41, "used_s_ago": 2.0}
    hottest = {name: {**one, "prefixes": [prefix]} for name, one in found.items()}
    return {"contents": found, "prefixes": {"3f0a91c2": hottest}}


def span(start: int, stop: int, what: str, **more: Any) -> dict[str, Any]:
    return {"start": start, "stop": stop, "what": what, **more}


def request(at: float = NOW, **changes: Any) -> dict[str, Any]:
    """Return what is known of a request that came 3 s before `at`."""
    known: dict[str, Any] = {"request_id": 7, "name": "", "replica": "one", "rank": 0}
    known |= {"at": at - 3, "namespace": "3f0a91c2", "num_tokens": 320, "own_tokens": 0}
    known |= {"hit_tokens": 160, "missed_tokens": 144, "reason": "never_stored", "leaving": []}
    known |= {"stage_s": 0.012, "lease_s": 0.0004, "is_sampled": False, "log_since": at - 7200}
    known["ranges"] = [
        span(0, 160, "hit", way="nixl", source="kvray-shard-aa"),
        span(160, 304, "miss", reason="never_stored", places=[]),
        span(304, 320, "computed"),
    ]
    return known | changes


def requests(at: float = NOW) -> dict[str, Any]:
    one = request(at, replica=f"on-bb {MARKUP}")
    return {"requests": [one, {**one, "request_id": 6, "at": at - 9}], "silent": []}

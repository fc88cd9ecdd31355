"""Replicas without keys: they use no tier while the engine reads its checkpoint."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvray.config import format_size


def unnamed_sentences(replicas: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (the reason, the remedy) for each rank that has no keys yet."""
    for replica in replicas:
        counters = replica["counters"]
        if replica["connected"] and "fingerprint_bytes" in counters:
            who = f"replica {replica['replica']} rank {replica['rank']}"
            if counters.get("fingerprint_failed"):
                yield (
                    f"{who} cannot read its checkpoint, and uses no tier",
                    "look at its log for the reason, or name the model in connector.model_key",
                )
            else:
                yield (
                    f"{who} uses no tier until it has read its checkpoint: {_progress(counters)}",
                    "wait, or name the model in connector.model_key",
                )


def _progress(counters: Mapping[str, int]) -> str:
    total, done = counters["fingerprint_bytes"], counters.get("fingerprint_bytes_read", 0)
    left_s = (total - done) * counters.get("uptime_s", 0) // max(done, 1)
    about = f", about {left_s} s left" if done else ""
    return f"{format_size(done)} of {format_size(total)} read{about}"

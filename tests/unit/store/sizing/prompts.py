"""Prompts of a trace as an engine samples them."""

import numpy as np

from kvray.store.arena.tables import Array
from kvray.store.replay import Trace
from kvray.store.sizing import SampledPrompts, TrafficSample
from kvray.store.sizing.prompts import LIMIT_MAX

SIZES = {"block_bytes": 1, "tokens_per_block": 1}


def sampled(paths: list[Array], *, limit: int = LIMIT_MAX, answers: int = 0) -> SampledPrompts:
    """Return prompts, each of the keys in a path; the last `answers` of each are its answer's."""
    kept = [path[path <= limit] for path in paths]
    asked = [path[: len(path) - answers] for path in paths]
    lengths = [
        (len(keys), np.count_nonzero(prompt <= limit), 0)
        for keys, prompt in zip(kept, asked, strict=True)
        if len(keys)
    ]
    names = ("num_lost", "num_own", "num_hit", "num_disk", "num_remote")
    return SampledPrompts(
        limit=limit,
        num_blocks=sum(map(len, asked)),
        num_tokens=sum(map(len, asked)),
        **dict.fromkeys(names, 0),
        ages=np.zeros(len(lengths), dtype="f4"),
        lengths=np.array(lengths, dtype=np.int64).reshape(-1, 3),
        keys=np.concatenate([np.zeros(0, "u8"), *kept]),
    )


def paths_of(trace: Trace, seed: int = 0) -> list[Array]:
    """Return the keys of each request."""
    numbers = np.random.default_rng(seed).integers(0, 2**64, trace.num_unique, dtype="u8")
    return np.split(numbers[trace.ids], trace.starts[1:-1])


def fed(sample: TrafficSample, trace: Trace, seed: int = 0) -> TrafficSample:
    """Give a sample all requests of a trace, one report each, as it comes over the wire."""
    for at, path in zip(trace.times.tolist(), paths_of(trace, seed), strict=True):
        prompts = sampled([path], limit=sample.limit("one", block_bytes=1))
        sample.add("one", SampledPrompts.unpack(prompts.pack()), **SIZES, now=at)
    return sample

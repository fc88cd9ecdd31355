"""`kvray bench connector`: the time that the connector takes of an engine's thread."""

from __future__ import annotations

import gc
import itertools
import logging
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from numpy.random import default_rng

from kvray.config import format_size, load_config
from kvray.errors import ConfigError, KVRayError
from kvray.lab.bench.connector_engine import (
    BLOCK_STEP,
    BenchEngine,
    ConnectorTier,
    Neighbour,
    Prompt,
    Sample,
)
from kvray.lab.bench.report import Report, Row, cores, hash_rows, value_row
from kvray.lab.bench.runner import (
    LONG_TOKENS,
    SHORT_TOKENS,
    TOKENS_PER_BLOCK,
    Duration,
    Pair,
    Runner,
    parse_option,
)

NUM_SLOTS = 65_536
"""As many as a default arena of 4 GiB has: the tables, not the blocks, are looked up."""

_VOCABULARY = 128_000
_WARM_UP = 0.1
"""Share of the requests that are served before those that count."""
_FULL = 32
_STEPS = {
    "match": "    of it: match and lease",
    "plan": "    of it: plan of the pass",
    "finish": "    of it: end of the request",
    "pickle": "besides: pickling the metadata",
    "load": "besides: start_load_kv without copies",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests of one kind."""

    name: str
    """Start of its figures' names."""
    title: str
    num_tokens: int = SHORT_TOKENS
    """Of the prefix that is stored; a prompt has one token more."""
    num_prompts: int = 16
    """Different prompts that are served in turn: an engine's pool never has the next one."""
    num_ranks: int = 1
    batch: int = 1
    """Requests in one pass."""
    share: int = 1
    """That many times fewer passes are measured."""
    is_stored: bool = True
    verify: bool = False
    """Whether the engine notes what its shard makes spans of."""
    is_published: bool = False
    """Whether the engine tells its shard the tokens of its blocks, for KV events."""
    neighbour: Neighbour | None = None

    def count(self, num_requests: int) -> int:
        """Return how many passes are measured for `num_requests` of a usual case."""
        return max(2, num_requests // self.share)


_ALL = "8k tokens, all stored"
CASES = (
    Case(name="leader", title=_ALL),
    Case(name="leader_1k", title="1k tokens, all stored", num_tokens=1024),
    Case(
        name="leader_128k",
        title="128k tokens, all stored",
        num_tokens=LONG_TOKENS,
        num_prompts=2,
        share=5,
    ),
    *(Case(name=f"leader_tp{n}", title=f"{_ALL}, {n} ranks", num_ranks=n) for n in (2, 4, 8)),
    Case(name="leader_published", title=f"{_ALL}, with KV events", is_published=True),
    Case(name="leader_verified", title=f"{_ALL}, verified", verify=True),
    Case(
        name="leader_batch",
        title=f"{_ALL}, {_FULL} in a pass",
        batch=_FULL,
        num_prompts=2 * _FULL,
    ),
    Case(
        name="leader_beside_work",
        title="8k tokens, verified, beside other work",
        verify=True,
        neighbour="spin",
    ),
    Case(name="leader_contended", title="8k tokens, beside a writer", neighbour="churn"),
    Case(name="leader_miss", title="8k tokens, none stored", is_stored=False),
    Case(
        name="leader_miss_published",
        title="8k tokens, none stored, with KV events",
        is_stored=False,
        is_published=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The measured requests of a case."""

    case: Case
    samples: list[Sample]
    collections_s: list[float]
    """Runs of Python's garbage collector meanwhile."""

    @property
    def num_missed(self) -> int:
        """How many requests were promised less than is stored."""
        expected = self.case.num_tokens if self.case.is_stored else 0
        return sum(hit < expected for sample in self.samples for hit in sample.hit_tokens)

    def rows(self) -> list[Row]:
        """Return the rows of the median and of the slowest percent."""
        pairs = [Pair(Duration(one.leader_s), Duration(one.hash_s)) for one in self.samples]
        return hash_rows(self.case.title, self.case.name, pairs)

    def step_rows(self) -> list[Row]:
        """Return the parts of the leader's time, and the work that comes on top, as medians."""
        rows = []
        for name, title in _STEPS.items():
            seconds = statistics.median(one.calls.get(name, 0.0) for one in self.samples)
            rows.append(value_row(title, "ms", 1000 * seconds, f"{self.case.name}_{name}_ms_p50"))
        return rows


def run(runner: Runner, *, config: Path | None, num_requests: int, block: str) -> Report:
    """Take all cases.

    Raises:
        ConfigError: no pool has blocks of that size.
        KVRayError: there is no room, or too little was found again.
    """
    settings, block_bytes = load_config(config), parse_option("--block", block)
    if block_bytes % BLOCK_STEP:
        raise ConfigError(
            f"--block {format_size(block_bytes)} is no multiple of {BLOCK_STEP} bytes; give one."
        )
    # Engines warn that there is no shard; here that is as it should be.
    logging.getLogger("kvray.node").setLevel(logging.ERROR)
    capacity = NUM_SLOTS * block_bytes
    runner.show("Starting", total=sum(case.count(num_requests) for case in CASES))
    tier = ConnectorTier(settings, capacity=capacity, block_bytes=block_bytes, runner=runner)
    taken = [_take(case, tier, num_requests, runner) for case in CASES]
    main, *others = taken
    rows = [*main.rows(), *main.step_rows(), *(row for one in others for row in one.rows())]
    longest_ms = 1000 * max(main.collections_s, default=0.0)
    note = (
        f"Medians over {len(main.samples)} requests of the leader's time for one; blocks of"
        f" {format_size(block_bytes)} in an arena of {format_size(capacity)}, on {cores()}. The"
        " bare work is hashing the prompt alone. Python's garbage collector ran"
        f" {len(main.collections_s)} times in the first case, for at most {longest_ms:.2g} ms."
    )
    for one in taken:
        if one.num_missed:
            note += f"\n{one.num_missed} requests found the arena busy: {one.case.title}."
    return Report(
        rows=[*rows, _metadata_row(taken), *_small_metadata(tier)],
        note=note,
        facts={
            "missed_requests": {one.case.name: one.num_missed for one in taken},
            "requests": len(main.samples),
            "gc_runs": len(main.collections_s),
            "gc_ms_max": round(longest_ms, 4),
            "block_bytes": block_bytes,
            "capacity_bytes": capacity,
        },
    )


def _take(case: Case, tier: ConnectorTier, num_requests: int, runner: Runner) -> Taken:
    """Serve the requests of a case.

    Another engine stores the prompts before, as an earlier replica would.

    Raises:
        KVRayError: so many were missed that their figures would mean nothing.
    """
    runner.show(f"Measuring {case.title}")
    tier.clear()
    count = case.count(num_requests)
    prompts = [_prompt(case.num_tokens, seed) for seed in range(case.num_prompts)]
    if case.is_stored:
        _serve(tier, case, ([one] for one in prompts))
    samples: list[Sample] = []
    marks: list[float] = []

    def note(sample: Sample) -> None:
        samples.append(sample)
        runner.advance()

    def mark(*_: object) -> None:
        marks.append(time.perf_counter())

    with (
        BenchEngine(
            tier,
            num_ranks=case.num_ranks,
            num_blocks=_num_blocks(case.num_tokens, case.batch),
            verify=case.verify,
            is_published=case.is_published,
        ) as engine,
        tier.beside(case.neighbour) if case.neighbour else nullcontext(),
    ):
        batches = _batches(case, prompts)
        engine.serve(itertools.islice(batches, max(1, int(_WARM_UP * count))), lambda _: None)
        gc.collect()
        gc.freeze()
        gc.callbacks.append(mark)  # is called before and after each collection
        engine.serve(itertools.islice(batches, count), note)
        gc.callbacks.remove(mark)
        gc.unfreeze()
    collections_s = [ended - began for began, ended in zip(marks[::2], marks[1::2], strict=True)]
    taken = Taken(case=case, samples=samples, collections_s=collections_s)
    if 2 * taken.num_missed > count * case.batch and case.neighbour != "churn":
        raise KVRayError(
            f"{taken.num_missed} of {count * case.batch} requests of the bench did not find"
            " their stored blocks; run it again when the machine is quiet, or raise"
            " arena.lock_wait_s."
        )
    return taken


def _metadata_row(taken: list[Taken]) -> Row:
    by_name = {one.case.name: one for one in taken}
    blocks = SHORT_TOKENS // TOKENS_PER_BLOCK
    loaded, saved = (
        max(sample.meta_bytes for sample in by_name[name].samples)
        for name in ("leader", "leader_miss")
    )
    worst = max(loaded, saved) / blocks
    return Row(
        title=f"metadata of {blocks} blocks, for each block and rank",
        unit="bytes",
        ours=worst,
        figures={
            "metadata_bytes_per_block_rank": worst,
            "metadata_bytes_load": loaded,
            "metadata_bytes_save": saved,
        },
    )


def _small_metadata(tier: ConnectorTier) -> list[Row]:
    """Return the rows of the pickled metadata of a pass with next to nothing to tell."""
    tier.clear()
    one_block = _prompt(TOKENS_PER_BLOCK, 1)
    nothing, saved = _serve(tier, CASES[0], [[_prompt(1, 0)], [one_block]])
    (loaded,) = _serve(tier, CASES[0], [[one_block]])
    most = max(saved.meta_bytes, loaded.meta_bytes)
    empty = "metadata, nothing to load or save"
    return [
        value_row(empty, "bytes", nothing.meta_bytes, "metadata_bytes_empty"),
        value_row("metadata, one block", "bytes", most, "metadata_bytes_one_block"),
    ]


def _serve(tier: ConnectorTier, case: Case, batches: Iterable[list[Prompt]]) -> list[Sample]:
    """Serve `batches` by an engine of their own, in chunks as engines do."""
    samples: list[Sample] = []
    with BenchEngine(
        tier,
        num_ranks=case.num_ranks,
        num_blocks=_num_blocks(case.num_tokens, 1),
        chunk_tokens=SHORT_TOKENS,
    ) as engine:
        engine.serve(batches, samples.append)
    return samples


def _batches(case: Case, prompts: list[Prompt]) -> Iterator[list[Prompt]]:
    """Yield batches without end: stored prompts in turn, or prompts that never were stored."""
    unstored = (_prompt(case.num_tokens, seed) for seed in itertools.count(len(prompts)))
    source = itertools.cycle(prompts) if case.is_stored else unstored
    while True:
        yield list(itertools.islice(source, case.batch))


def _prompt(num_tokens: int, seed: int) -> Prompt:
    """Return a prompt whose first `num_tokens` tokens can be a hit."""
    rng = default_rng((num_tokens, seed))
    tokens: Prompt = rng.integers(0, _VOCABULARY, num_tokens + 1).tolist()
    return tokens


def _num_blocks(num_tokens: int, batch: int) -> int:
    """Return the blocks of a batch: the engine's pool has no more, so that it keeps none."""
    return batch * (num_tokens // TOKENS_PER_BLOCK + 1)

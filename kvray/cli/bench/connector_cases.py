"""The cases of `kvray bench connector`: which prompts meet which engine, and what that took."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from numpy.random import default_rng

from kvray.cli.bench.connector_engine import BenchEngine, Prompt, Sample
from kvray.cli.bench.connector_probe import Collections
from kvray.cli.bench.connector_stage import ConnectorStage
from kvray.cli.bench.scale import LONG_TOKENS, SHORT_TOKENS, TOKENS_PER_BLOCK
from kvray.errors import KVRayError

_VOCABULARY = 128_000
_WARM_UP = 0.1
"""Share of the requests that are served before those that count."""
_LONG_SHARE = 5
"""Of very long prompts that many times fewer are measured."""
_FULL = 32

Note = Callable[[Sample], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests of one kind."""

    name: str
    """Start of its figures."""
    title: str
    num_tokens: int = SHORT_TOKENS
    """Of the prefix that is stored; a prompt has one token more."""
    num_ranks: int = 1
    batch: int = 1
    """Requests in one pass."""
    is_stored: bool = True
    verify: bool = False
    has_neighbour: bool = False
    most_p50: float | None = None
    """What the median should be at most, ms."""
    most_p99: float | None = None

    def count(self, num_requests: int) -> int:
        """Return how many batches are served for `num_requests` of a usual case."""
        share = _LONG_SHARE if self.num_tokens > SHORT_TOKENS else 1
        return max(2, num_requests // share)

    @property
    def num_prompts(self) -> int:
        """Different prompts that are served in turn: an engine's pool never has the next one."""
        return 2 if self.num_tokens > SHORT_TOKENS else 16 if self.batch == 1 else 2 * self.batch


CASES = (
    Case(name="leader", title="8k tokens, all stored", most_p50=0.4, most_p99=1.0),
    Case(name="leader_1k", title="1k tokens, all stored", num_tokens=1024),
    Case(name="leader_128k", title="128k tokens, all stored", num_tokens=LONG_TOKENS),
    Case(name="leader_tp2", title="8k tokens, all stored, 2 ranks", num_ranks=2),
    Case(name="leader_tp4", title="8k tokens, all stored, 4 ranks", num_ranks=4),
    Case(name="leader_tp8", title="8k tokens, all stored, 8 ranks", num_ranks=8),
    Case(name="leader_verified", title="8k tokens, all stored, verified", verify=True),
    Case(name="leader_batch", title=f"8k tokens, all stored, {_FULL} in a pass", batch=_FULL),
    Case(name="leader_contended", title="8k tokens, beside a writer", has_neighbour=True),
    Case(name="leader_miss", title="8k tokens, none stored", is_stored=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a case took."""

    case: Case
    samples: list[Sample]
    collections_s: list[float]
    """Runs of Python's garbage collector meanwhile."""

    @property
    def num_missed(self) -> int:
        """How many requests were promised less than is stored."""
        wanted = self.case.num_tokens if self.case.is_stored else 0
        return sum(hit < wanted for sample in self.samples for hit in sample.hit_tokens)


def take(
    case: Case, stage: ConnectorStage, num_requests: int, advance: Callable[[], None]
) -> Taken:
    """Serve the requests of a case.

    An engine of its own stores the prompts before, as a replica would that was there earlier.

    Args:
        case: which requests.
        stage: where.
        num_requests: how many of a usual case; see `Case.count`.
        advance: called after each batch.

    Raises:
        KVRayError: so many were missed that their figures would say nothing.
    """
    stage.clear()
    count, pool = case.count(num_requests), _pool_blocks(case.num_tokens, case.batch)
    prompts = [_prompt(case.num_tokens, seed) for seed in range(case.num_prompts)]
    if case.is_stored:
        _serve(stage, case, _pool_blocks(case.num_tokens, 1), ([one] for one in prompts))
    samples: list[Sample] = []

    def note(sample: Sample) -> None:
        samples.append(sample)
        advance()

    with (
        BenchEngine(stage, num_ranks=case.num_ranks, num_blocks=pool, verify=case.verify) as engine,
        stage.neighbour() if case.has_neighbour else nullcontext(),
    ):
        batches = _batches(case, prompts)
        engine.serve(itertools.islice(batches, max(1, int(_WARM_UP * count))), lambda _: None)
        gc.collect()
        gc.freeze()
        with Collections() as collections:
            engine.serve(itertools.islice(batches, count), note)
        gc.unfreeze()
    taken = Taken(case=case, samples=samples, collections_s=collections.seconds)
    if 2 * taken.num_missed > count * case.batch and not case.has_neighbour:
        raise KVRayError(
            f"{taken.num_missed} of {count * case.batch} requests of the bench did not find what"
            " was stored for them; run it again when the machine is quiet, or raise"
            " arena.lock_wait_s."
        )
    return taken


def metadata_bytes(stage: ConnectorStage) -> dict[str, int]:
    """Return the pickled bytes of the metadata of a pass with next to nothing to tell."""
    stage.clear()
    tiny, one = _prompt(1, 0), _prompt(TOKENS_PER_BLOCK, 1)
    first = _serve(stage, CASES[0], 4, [[tiny], [one]])
    second = _serve(stage, CASES[0], 4, [[one]])
    return {
        "empty": first[0].meta_bytes,
        "one_block": max(first[1].meta_bytes, second[0].meta_bytes),
    }


def _serve(
    stage: ConnectorStage, case: Case, pool_blocks: int, batches: Iterable[list[Prompt]]
) -> list[Sample]:
    """Serve `batches` by an engine of their own, in chunks as engines do."""
    samples: list[Sample] = []
    with BenchEngine(
        stage, num_ranks=case.num_ranks, num_blocks=pool_blocks, chunk_tokens=SHORT_TOKENS
    ) as engine:
        engine.serve(batches, samples.append)
    return samples


def _batches(case: Case, prompts: list[Prompt]) -> Iterator[list[Prompt]]:
    """Yield batches without end: of what is stored in turn, or of what never was."""
    seeds = itertools.count(len(prompts))
    stored = itertools.cycle(prompts)
    while True:
        yield [
            next(stored) if case.is_stored else _prompt(case.num_tokens, next(seeds))
            for _ in range(case.batch)
        ]


def _prompt(num_tokens: int, seed: int) -> Prompt:
    """Return a prompt whose first `num_tokens` tokens can be a hit."""
    rng = default_rng((num_tokens, seed))
    tokens: Prompt = rng.integers(0, _VOCABULARY, num_tokens + 1).tolist()
    return tokens


def _pool_blocks(num_tokens: int, batch: int) -> int:
    """Return the blocks of a batch: as many as the engine's pool has, so that it keeps none."""
    return batch * (num_tokens // TOKENS_PER_BLOCK + 1)

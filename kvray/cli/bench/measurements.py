"""The measurements of `kvray bench local`, each a plain function over a stage."""

from collections.abc import Callable
from dataclasses import dataclass

from kvray.cli.bench.pairs import Pair, Timing, measure
from kvray.cli.bench.results import (
    Result,
    copy_result,
    cpu_result,
    first_store_result,
    lookup_results,
)
from kvray.cli.bench.scale import LARGE_BYTES, LONG_TOKENS, SHORT_TOKENS, SMALL_BYTES
from kvray.cli.bench.stage import Stage
from kvray.cli.bench.worker import Worker

_LOOKUP_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One group of rows, for the bar and the table."""

    title: str
    take: Callable[[Stage], list[Result]]


def first_stores(stage: Stage) -> list[Result]:
    """Store into an arena that was made and mapped a moment ago; the floor comes after it."""
    pairs = []
    for _ in range(stage.scale.first_pairs):
        stage.make_arena(stage.scale.block_spec(), readers=False)
        ours = _store(stage, stage.scale.num_large, LARGE_BYTES)
        pairs.append(Pair(ours=ours, floor=_copy_in(stage, stage.scale.large_bytes)))
    return [first_store_result(pairs, num_bytes=stage.scale.large_bytes, least_gb_s=10)]


def stores(stage: Stage) -> list[Result]:
    """Store into an empty arena, large blocks and small ones."""
    stage.make_arena(stage.scale.block_spec())
    scale = stage.scale
    return [
        _store_row(stage, "store, 4 MiB blocks", "store_{}_4mib", scale.num_large, LARGE_BYTES),
        _store_row(stage, "store, 128 KiB blocks", "store_{}_128kib", scale.num_small, SMALL_BYTES),
    ]


def full_stores(stage: Stage) -> list[Result]:
    """Store into a full arena, where each block has to push another one out."""
    stage.clear()
    for _ in range(-(-stage.scale.capacity // stage.scale.large_bytes)):
        _store(stage, stage.scale.num_large, LARGE_BYTES)
    pairs = measure(
        stage.scale.pairs,
        ours=lambda: _store(stage, stage.scale.num_large, LARGE_BYTES),
        floor=lambda: _copy_in(stage, stage.scale.large_bytes),
    )
    title = "store into a full arena, 4 MiB blocks"
    num_bytes = stage.scale.large_bytes
    return [copy_result(title, "store_full_{}_4mib", pairs, num_bytes=num_bytes, least=0.85)]


def large_retrieves(stage: Stage) -> list[Result]:
    """Retrieve large blocks: one reader, one that verifies, four at once."""
    chain = _fill(stage, stage.scale.num_large, LARGE_BYTES)
    one, num_bytes = stage.readers[:1], stage.scale.large_bytes

    def retrieve(readers: list[Worker], *, verify: bool = False) -> list[Pair]:
        return _retrieves(stage, readers, chain, stage.scale.num_large, LARGE_BYTES, verify=verify)

    plain = retrieve(one)
    return [
        copy_result(
            "retrieve, 4 MiB blocks", "retrieve_{}_4mib", plain, num_bytes=num_bytes, least=0.95
        ),
        copy_result(
            "retrieve and verify, 4 MiB blocks",
            "retrieve_verified_{}_4mib",
            retrieve(one, verify=True),
            num_bytes=num_bytes,
            least=0.88,
        ),
        copy_result(
            "four readers retrieve, 4 MiB blocks",
            "retrieve4_{}_4mib",
            retrieve(stage.readers),
            num_bytes=num_bytes * len(stage.readers),
            least=0.93,
        ),
        cpu_result(plain, num_bytes=num_bytes),
    ]


def small_retrieves(stage: Stage) -> list[Result]:
    """Retrieve small blocks."""
    scale = stage.scale
    chain = _fill(stage, scale.num_small, SMALL_BYTES)
    pairs = _retrieves(
        stage, stage.readers[:1], chain, scale.num_small, SMALL_BYTES, count=scale.small_pairs
    )
    title, num_bytes = "retrieve, 128 KiB blocks", scale.num_small * SMALL_BYTES
    return [copy_result(title, "retrieve_{}_128kib", pairs, num_bytes=num_bytes, least=0.85)]


def lookups(stage: Stage) -> list[Result]:
    """Look up a short and a long prompt of which all, half and nothing is stored."""
    stage.make_arena(stage.scale.lookup_spec())
    rows: list[Result] = []
    for num_tokens, name, count, most, most_spread in (
        (SHORT_TOKENS, "lookup_8k", stage.scale.short_lookups, 1.4, 3.0),
        (LONG_TOKENS, "lookup_128k", stage.scale.long_lookups, 1.25, None),
    ):
        stage.writer.call("store_prompt", num_tokens=num_tokens, block_bytes=_LOOKUP_BLOCK_BYTES)
        for percent, suffix in ((100, ""), (50, "_half"), (0, "_none")):
            spans = stage.readers[0].call(
                "look_up", num_tokens=num_tokens, present=num_tokens * percent // 100, count=count
            )
            rows += lookup_results(
                f"lookup of {num_tokens:,} tokens, {percent} % stored",
                name + suffix,
                [Pair(ours=Timing(seconds=a), floor=Timing(seconds=b)) for a, b in spans],
                most=None if suffix else most,
                most_spread=None if suffix else most_spread,
            )
    return rows


MEASUREMENTS = (
    Measurement(title="first stores", take=first_stores),
    Measurement(title="stores", take=stores),
    Measurement(title="stores into a full arena", take=full_stores),
    Measurement(title="retrieves of large blocks", take=large_retrieves),
    Measurement(title="retrieves of small blocks", take=small_retrieves),
    Measurement(title="lookups", take=lookups),
)


def _fill(stage: Stage, num_blocks: int, block_bytes: int) -> int:
    """Store one chain into the emptied arena; return its number."""
    stage.clear()
    _store(stage, num_blocks, block_bytes)
    return stage.num_chains


def _store(stage: Stage, num_blocks: int, block_bytes: int) -> Timing:
    return stage.time(
        [stage.writer],
        "store",
        chain=stage.next_chain(),
        num_blocks=num_blocks,
        block_bytes=block_bytes,
    )


def _copy_in(stage: Stage, num_bytes: int) -> Timing:
    return stage.time([stage.writer], "copy_in", num_bytes=num_bytes)


def _store_row(stage: Stage, title: str, name: str, num_blocks: int, block_bytes: int) -> Result:
    """Return the row of stores into the arena, which is emptied before each."""
    scale, num_bytes = stage.scale, num_blocks * block_bytes

    def store() -> Timing:
        stage.clear()
        return _store(stage, num_blocks, block_bytes)

    pairs = measure(
        scale.pairs if block_bytes == LARGE_BYTES else scale.small_pairs,
        ours=store,
        floor=lambda: _copy_in(stage, num_bytes),
    )
    least = 0.90 if block_bytes == LARGE_BYTES else 0.85
    return copy_result(title, name, pairs, num_bytes=num_bytes, least=least)


def _retrieves(
    stage: Stage,
    readers: list[Worker],
    chain: int,
    num_blocks: int,
    block_bytes: int,
    *,
    count: int | None = None,
    verify: bool = False,
) -> list[Pair]:
    return measure(
        count or stage.scale.pairs,
        ours=lambda: stage.time(
            readers,
            "retrieve",
            chain=chain,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            verify=verify,
        ),
        floor=lambda: stage.time(readers, "copy_out", num_bytes=num_blocks * block_bytes),
    )

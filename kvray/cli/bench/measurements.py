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
        floor = _copy(stage, [stage.writer], "copy_in", num_bytes=stage.scale.large_bytes)
        pairs.append(Pair(ours=ours, floor=floor))
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
    num_bytes = stage.scale.large_bytes
    stage.clear()
    for _ in range(-(-stage.scale.capacity // num_bytes)):
        _store(stage, stage.scale.num_large, LARGE_BYTES)
    pairs = measure(
        stage.scale.pairs,
        ours=lambda _: _store(stage, stage.scale.num_large, LARGE_BYTES),
        floor=lambda _: _copy(stage, [stage.writer], "copy_in", num_bytes=num_bytes),
    )
    title = "store into a full arena, 4 MiB blocks"
    return [copy_result(title, "store_full_{}_4mib", pairs, num_bytes=num_bytes, least=0.85)]


def large_retrieves(stage: Stage) -> list[Result]:
    """Retrieve large blocks: one reader, one that verifies, four at once."""
    num_blocks, num_bytes = stage.scale.num_large, stage.scale.large_bytes
    chains = _fill(stage, num_blocks, LARGE_BYTES)
    one, all_four = stage.readers[:1], stage.readers
    plain = _retrieves(stage, one, chains, num_blocks, LARGE_BYTES)
    verified = _retrieves(stage, one, chains, num_blocks, LARGE_BYTES, verify=True)
    at_once = _retrieves(stage, all_four, chains, num_blocks, LARGE_BYTES)
    title = "{}, 4 MiB blocks"
    return [
        copy_result(
            title.format("retrieve"), "retrieve_{}_4mib", plain, num_bytes=num_bytes, least=0.95
        ),
        copy_result(
            title.format("retrieve and verify"),
            "retrieve_verified_{}_4mib",
            verified,
            num_bytes=num_bytes,
            least=0.88,
        ),
        copy_result(
            title.format("four readers retrieve"),
            "retrieve4_{}_4mib",
            at_once,
            num_bytes=num_bytes * len(all_four),
            least=0.93,
        ),
        cpu_result(plain, num_bytes=num_bytes),
    ]


def small_retrieves(stage: Stage) -> list[Result]:
    """Retrieve small blocks."""
    num_blocks = stage.scale.num_small
    chains = _fill(stage, num_blocks, SMALL_BYTES)
    pairs = _retrieves(stage, stage.readers[:1], chains, num_blocks, SMALL_BYTES)
    title, num_bytes = "retrieve, 128 KiB blocks", num_blocks * SMALL_BYTES
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


def _store_row(stage: Stage, title: str, name: str, num_blocks: int, block_bytes: int) -> Result:
    """Return the row of stores into the arena, which is emptied before it is full."""
    num_bytes = num_blocks * block_bytes
    num_shelves = stage.scale.num_shelves(num_bytes)

    def store(index: int) -> Timing:
        shelf = index % num_shelves
        if shelf == 0:
            stage.clear()
        return _store(stage, num_blocks, block_bytes, shelf=shelf)

    def copy(index: int) -> Timing:
        shelf = _other_shelf(index, num_shelves)
        return _copy(stage, [stage.writer], "copy_in", num_bytes=num_bytes, shelf=shelf)

    pairs = measure(stage.scale.pairs_of(block_bytes), ours=store, floor=copy)
    least = 0.90 if block_bytes == LARGE_BYTES else 0.85
    return copy_result(title, name, pairs, num_bytes=num_bytes, least=least)


def _retrieves(
    stage: Stage,
    readers: list[Worker],
    chains: list[int],
    num_blocks: int,
    block_bytes: int,
    *,
    verify: bool = False,
) -> list[Pair]:
    """Return the pairs of `readers` that retrieve one chain after the other, each to its shelf."""
    num_bytes = num_blocks * block_bytes

    def retrieve(index: int) -> Timing:
        shelf = index % len(chains)
        return stage.time(
            readers,
            "retrieve",
            chain=chains[shelf],
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            shelf=shelf,
            verify=verify,
        )

    def copy(index: int) -> Timing:
        shelf = _other_shelf(index, len(chains))
        return _copy(stage, readers, "copy_out", num_bytes=num_bytes, shelf=shelf)

    return measure(stage.scale.pairs_of(block_bytes), ours=retrieve, floor=copy)


def _fill(stage: Stage, num_blocks: int, block_bytes: int) -> list[int]:
    """Store a chain from each shelf into the emptied arena; return their numbers."""
    stage.clear()
    chains = []
    for shelf in range(stage.scale.num_shelves(num_blocks * block_bytes)):
        _store(stage, num_blocks, block_bytes, shelf=shelf)
        chains.append(stage.num_chains)
    return chains


def _other_shelf(index: int, num_shelves: int) -> int:
    """Return the shelf of the floor in a pair: far from the one that kvray takes."""
    return (index + num_shelves // 2) % num_shelves


def _store(stage: Stage, num_blocks: int, block_bytes: int, *, shelf: int = 0) -> Timing:
    return stage.time(
        [stage.writer],
        "store",
        chain=stage.next_chain(),
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        shelf=shelf,
    )


def _copy(
    stage: Stage, workers: list[Worker], name: str, *, num_bytes: int, shelf: int = 0
) -> Timing:
    return stage.time(workers, name, num_bytes=num_bytes, shelf=shelf)

"""The states of a prompt's blocks, derived from the answers of the shards; pure."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from kvray.actors.shard.queries import Whereabouts
from kvray.store.block_history import CAUSES, TIERS

STORED = "stored"
PARTIAL = "partial"  # only some of its parts are stored, so it is of no use
EVICTED = "evicted"
NEVER_STORED = "never_stored"  # or so long ago that no shard remembers


class BlockState(NamedTuple):
    """The state of one block."""

    state: str
    places: tuple[tuple[str, str], ...] = ()
    """(shard, tier) of the shards that have it whole, else of those that have some of it."""
    node: str = ""
    """The shard whose tier it left last."""
    tier: str = ""
    cause: str = ""
    """Why it left, of `block_history.CAUSES`."""
    at: float = 0.0
    """When it left, in seconds since the epoch; 0: it did not."""


def block_states(
    answers: Mapping[str, Whereabouts], num_blocks: int, *, num_parts: int, past: bool = False
) -> list[BlockState]:
    """Return the state of each of `num_blocks` blocks, from the answers by shard.

    For a question about the `past`, an eviction outweighs that the block is stored now.
    """
    return [_block_state(answers, block, num_parts, past=past) for block in range(num_blocks)]


def state_runs(found: Sequence[BlockState]) -> Iterator[tuple[int, list[BlockState]]]:
    """Yield start and blocks of each run of equal states, save for when the blocks left."""
    start = 0
    for _, run in groupby(found, lambda block: block._replace(at=0.0)):
        blocks = list(run)
        yield start, blocks
        start += len(blocks)


def _block_state(
    answers: Mapping[str, Whereabouts], block: int, num_parts: int, *, past: bool
) -> BlockState:
    whole: list[tuple[str, str]] = []
    some: list[tuple[str, str]] = []
    total = 0
    latest, node = 0.0, ""
    for shard, one in answers.items():
        either = int(one.either[block])
        if either:
            total += either
            tier = "host" if one.host[block] == either else "nvme"
            (whole if either >= num_parts else some).append((shard, tier))
        if one.left_at[block] > latest:
            latest, node = float(one.left_at[block]), shard
    # The parts of an engine that spans nodes are on several.
    places = tuple(whole or some)
    state = STORED if whole or total >= num_parts else PARTIAL if some else NEVER_STORED
    left = BlockState(EVICTED)
    if latest:
        tier, cause = answers[node].left_tier[block], answers[node].left_by[block]
        left = BlockState(EVICTED, places, node, TIERS[tier], CAUSES[cause], latest)
    if latest and (past or state == NEVER_STORED):
        return left
    if state == PARTIAL:
        return left._replace(state=PARTIAL, places=places)
    return BlockState(state, places)

"""A publisher of KV events as others have it: numbers, a log that is bounded, and a snapshot."""

from collections.abc import Iterator

from kvray.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event, pack
from kvray.events.pool_content import PoolContent, chain_digests

BLOCK = 2


def packed(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def leading(
    content: PoolContent, tokens: list[int], *, block_size: int = 4, salt: str | None = None
) -> int:
    """Return how many leading blocks of a prompt are in a content."""
    digests = {block_size: chain_digests(packed(tokens), block_size=block_size, salt=salt)}
    return content.num_tokens(digests) // block_size


class Publisher:
    """Blocks by hash, each with all tokens from the first on; `log` is what it can replay."""

    def __init__(self, *, log_max: int, has_snapshot: bool, life: int = 0) -> None:
        self.blocks: dict[int, list[int]] = {}
        self.log: list[tuple[int, bytes]] = []
        self.number = 0
        self._log_max = log_max
        self._has_snapshot = has_snapshot
        self._hashes = life * 1000
        self._at = float(life)

    @property
    def digests(self) -> frozenset[bytes]:
        return frozenset(
            chain_digests(packed(tokens), block_size=BLOCK)[-1] for tokens in self.blocks.values()
        )

    def publish(self, *events: Event) -> tuple[int, bytes]:
        self._at += 0.125
        made = self.number, pack(Batch(at=self._at, events=events, dp_rank=0))
        self.log = [*self.log, made][-self._log_max :]
        self.number += 1
        return made

    def store(self, parent: int | None, tokens: list[int]) -> tuple[int, bytes]:
        before = [] if parent is None else self.blocks[parent]
        hashes = []
        for start in range(0, len(tokens), BLOCK):
            self._hashes += 1
            hashes.append(self._hashes)
            self.blocks[self._hashes] = before + tokens[: start + BLOCK]
        return self.publish(_stored(hashes, parent, tokens))

    def remove(self, block: int) -> tuple[int, bytes]:
        del self.blocks[block]
        return self.publish(BlockRemoved(block_hashes=[block], medium="GPU"))

    def clear(self) -> tuple[int, bytes]:
        self.blocks.clear()
        return self.publish(AllBlocksCleared())

    def event(self, block: int) -> BlockStored:
        tokens = self.blocks[block]
        before = (one for one, held in self.blocks.items() if held == tokens[:-BLOCK])
        return _stored([block], next(before, None), tokens[-BLOCK:])

    def num_blocks(self) -> int:
        return len(self.blocks)

    def page(self, after: int, step: int) -> tuple[list[Event], int | None]:
        """Return one block, whatever the step, and the place of the next."""
        here = [self.event(block) for block in [*self.blocks][after : after + 1]]
        return here, after + 1 if after + 1 < len(self.blocks) else None

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        if self._has_snapshot and self.log and start < self.log[0][0]:
            yield -2, b"a header"
            last = self.number - 1
            batch = Batch(at=self._at, events=[AllBlocksCleared()], dp_rank=0)
            yield last, pack(batch)
            for block in self.blocks:
                yield last, pack(Batch(at=self._at, events=[self.event(block)], dp_rank=0))
        else:
            yield from [one for one in self.log if one[0] >= start]


def _stored(hashes: list[int], parent: int | None, tokens: list[int]) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=BLOCK,
        medium="GPU",
    )

"""An engine whose leader and rank have states of their own, as in two processes; driven by hand."""

import itertools
import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from kvray.config import load_config
from kvray.engine.cache_layout import CacheLayout, EngineIdentity, Group, LayerRange, Region
from kvray.engine.engine_args import CheckpointConfig, EngineArgs
from kvray.engine.leader import Leader
from kvray.engine.meta import ConnectorMeta
from kvray.engine.rank import RankWorker
from kvray.engine.request import Identity, PassReport, Prompt
from kvray.engine.shared_state import shared_state_for
from kvray.store import Arena
from tests.waiting import wait_for

BLOCK = 4
NUM_BLOCKS = 64
PAGE_BYTES = 128

ARGS = EngineArgs(
    model="nowhere",
    tokens_per_block=BLOCK,
    num_ranks=1,
    rank=0,
    block_reuse=True,
    quantization="",
    overrides="",
    attention_backend="any",
    engine="any 1.0",
    is_compiled=True,
    adapters="",
    checkpoint=CheckpointConfig(),
    spread_setting="",
    asks_again=True,
    weights_may_change=False,
    takes_offers_later=False,
)


class Apart:
    """Blocks are given out in turn; a page is a function of all tokens before its end."""

    def __init__(self, **changes: Any) -> None:
        self.args = replace(ARGS, **changes)
        config = load_config(None)
        self.rank = RankWorker(shared_state_for(object(), self.args, config))
        self.leader = Leader(shared_state_for(object(), self.args, config), counts_later=True)
        self.pages = torch.zeros((NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8)
        steps = (LayerRange((0, 1), 0, PAGE_BYTES),)
        group = Group(layers=(0, 1), window=None, own=(Region(pages=self.pages, steps=steps),))
        layout = CacheLayout(
            groups=(group,), dtype="float32", kv_factor=2, tokens_per_block=BLOCK, is_flat=True
        )
        self.rank.register(layout)
        identity = pickle.dumps(EngineIdentity.of(self.args, layout))
        self.identity: EngineIdentity = pickle.loads(identity)  # noqa: S301 - ours
        self.leader.shared.lead(self.identity)
        self._blocks = itertools.cycle(range(NUM_BLOCKS))
        self._numbers = itertools.count(1)

    def ask(self, number: int, tokens: list[int], computed: int = 0) -> int | None:
        """Ask for a promise; None: ask again."""

        def read() -> Prompt:
            return Prompt(number, list(tokens), len(tokens), computed, Identity())

        return self.leader.match(number, read)

    @property
    def totals(self) -> Counter[str]:
        return self.leader.shared.figures.totals

    @property
    def arena(self) -> Arena:
        arena = self.leader.shared.link.arena
        assert arena is not None
        return arena

    @property
    def leased(self) -> int:
        return int(self.arena.stats()["leased_blocks"])

    def new_blocks(self, tokens: list[int]) -> list[int]:
        blocks = [next(self._blocks) for _ in range(-(-len(tokens) // BLOCK))]
        self.pages[blocks] = 255
        return blocks

    def plan(self, *asked: tuple[int, list[int], list[int], int]) -> ConnectorMeta:
        reports = [
            PassReport(
                request_id=number,
                new_tokens=list(tokens),
                new_block_ids=blocks,
                computed_position=0,
                num_scheduled_tokens=len(tokens) - hit,
                is_new=True,
            )
            for number, tokens, blocks, hit in asked
        ]
        for number, *_ in asked:
            self.leader.count(number)
        meta: ConnectorMeta = pickle.loads(  # noqa: S301 - ours
            pickle.dumps(self.leader.plan([(report, True) for report in reports]))
        )
        return meta

    def compute(self, tokens: list[int], blocks: list[int]) -> None:
        for index in range(len(tokens) // BLOCK):
            self.pages[blocks[index]] = content(tokens, index)

    def serve(self, tokens: list[int]) -> int:
        """Do all of it, and check what was loaded; return how many tokens were."""
        number = next(self._numbers)
        hit = self.ask(number, tokens)
        assert hit is not None
        blocks = self.new_blocks(tokens)
        meta = self.plan((number, tokens, blocks, hit))
        self.rank.begin(meta, None)
        assert self.rank.failed == []
        self.check(tokens, blocks, hit)
        self.compute(tokens, blocks)
        self.rank.end(None)
        assert not self.leader.finish(number)
        # The pass ends when its pages were read; blocks are in the arena only after that.
        wait_for(lambda: number not in self.rank.shared.pending_reads, "the saves")
        return hit

    def check(self, tokens: list[int], blocks: list[int], hit: int) -> None:
        for index in range(hit // BLOCK):
            assert (self.pages[blocks[index]] == content(tokens, index)).all()

    def close(self) -> None:
        self.leader.close()
        self.rank.close()


def content(tokens: list[int], index: int) -> int:
    return sum((at + 1) * token for at, token in enumerate(tokens[: (index + 1) * BLOCK])) % 251

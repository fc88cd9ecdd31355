"""What an engine says of itself: the settings that decide what its blocks are, and who shares them.

Each connector reads them from its own engine, which names them in its own way.
"""

from dataclasses import dataclass
from functools import cached_property

from kvray.engine.model.checkpoint import CheckpointConfig


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """The engine's settings that decide what its blocks are and which of them may be shared."""

    model: str  # the checkpoint's path, or its name on a hub
    tokens_per_block: int
    num_ranks: int
    rank: int
    block_reuse: bool
    partial_reuse: bool
    quantization: str  # weight and KV quantisation as the engine names them, as one text
    overrides: str
    """What changes the checkpoint's own configuration or weights, as one text."""
    attention_backend: str
    engine: str
    ranks_per_node: int  # how many ranks a node has; 0: not said, and all are on one
    attention_dp: bool  # each rank has a whole KV cache for requests of its own
    is_compiled: bool  # the model is compiled by torch: hooks on its layers may not fire
    windows: tuple[int, ...]
    """The different attention windows that the engine was told of, in tokens, ascending."""
    adapters: str
    """How the engine reads LoRA adapters, as one text; enters the keys of requests with one."""
    checkpoint: CheckpointConfig
    is_sparse: bool
    """Attention picks its tokens by an index that is cached beside keys and values."""
    spread_setting: str
    """What a person sets to say how many ranks a node has."""
    asks_again: bool
    """The engine may be told to ask again later, and schedules other requests meanwhile."""
    holds_loads: bool
    """Its ranks copy and check blocks before they are promised, so the leader checks none."""
    drafts_tokens: bool
    """The engine drafts tokens and takes back the pages of those it rejects, without a word; so a
    page that was reported for an answer may belong to others by now."""
    weights_may_change: bool
    """The engine is set up to have its weights replaced while it runs."""
    takes_offers_later: bool
    """The engine may come back for an offer after passes, until it cancels it."""

    @cached_property
    def num_parts_ranks(self) -> int:
        """Ranks that each hold a share of every request's KV; with attention DP there is one."""
        return 1 if self.attention_dp else self.num_ranks

    @cached_property
    def part_rank(self) -> int:
        """This rank among them."""
        return 0 if self.attention_dp else self.rank

    @cached_property
    def is_spread(self) -> bool:
        """Whether, by `ranks_per_node`, ranks that share a request are on several nodes."""
        return not self.attention_dp and 0 < self.ranks_per_node < self.num_ranks

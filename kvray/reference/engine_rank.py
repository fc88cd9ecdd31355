"""What every rank of an engine has: its share of the model, a pool, a connector and an executor."""

from __future__ import annotations

import torch

from kvray.reference.cache_manager import KVCacheManager
from kvray.reference.checkpoint import load_checkpoint
from kvray.reference.engine_options import EngineOptions
from kvray.reference.executor import Executor
from kvray.reference.inbox import Inbox
from kvray.reference.intake import Intake
from kvray.reference.llm_args import KvCacheConfig, LlmArgs, Mapping, ParallelConfig
from kvray.reference.rank_intake import DealtIntake, SharedIntake
from kvray.reference.ranks import Ranks
from kvray.reference.start_up import bring_up, shut_down

START_TIMEOUT_S = 300.0
"""How long one rank may take longer than another to load its model."""


class EngineRank:
    """One rank, brought up and ready to run.

    Args:
        options: the same for every rank.
        ranks: the collectives with the others.
        inbox: where callers submit requests; None but on the leader.

    Raises:
        ConfigError: the model or the connector cannot be used.
        KVRayError: the connector failed, or another rank did.
    """

    def __init__(self, options: EngineOptions, ranks: Ranks, inbox: Inbox | None) -> None:
        torch.set_num_threads(options.num_threads)
        is_split = ranks.size > 1 and not options.enable_attention_dp
        checkpoint = load_checkpoint(
            options.model,
            tokens_per_block=options.tokens_per_block,
            cache_dir=options.cache_dir,
            split_over=ranks if is_split else None,
        )
        self.tokenizer = checkpoint.tokenizer
        self.model = checkpoint.model
        self.llm_args = _llm_args(options, ranks, checkpoint.name)
        self.cache = KVCacheManager(
            self.model.geometry,
            num_blocks=options.num_blocks,
            tokens_per_block=options.tokens_per_block,
            enable_block_reuse=options.enable_block_reuse,
            enable_partial_reuse=options.enable_partial_reuse,
            poison=options.poison,
        )
        ranks.meet(timeout_s=START_TIMEOUT_S)
        model_engine, self.connector = bring_up(
            self.llm_args,
            self.model,
            self.cache,
            ranks=ranks,
            pad_batch_size=options.pad_batch_size,
        )
        try:
            ranks.meet(timeout_s=START_TIMEOUT_S)
        except BaseException:
            self.shut_down()
            raise
        self.executor = Executor(
            model_engine,
            self.cache,
            _intake(options, ranks, inbox),
            connector=self.connector,
            overlap=options.overlap,
            max_batch_size=options.max_batch_size,
            chunk_tokens=options.pass_chunk_tokens,
            num_threads=options.num_threads,
            is_pass_shared=is_split,
            follows_main=options.runtime == "main",
        )

    def shut_down(self) -> None:
        """Let the connector go. Twice is fine."""
        connector, self.connector = self.connector, None
        shut_down(connector)


def _llm_args(options: EngineOptions, ranks: Ranks, model: str) -> LlmArgs:
    mapping = Mapping(
        world_size=ranks.size,
        rank=ranks.rank,
        tp_size=ranks.size,
        enable_attention_dp=options.enable_attention_dp,
    )
    return LlmArgs(
        model=model,
        tensor_parallel_size=ranks.size,
        gpus_per_node=options.ranks_per_node,
        enable_attention_dp=options.enable_attention_dp,
        parallel_config=ParallelConfig(mapping=mapping),
        enable_chunked_prefill=options.enable_chunked_prefill,
        disable_overlap_scheduler=not options.overlap,
        kv_cache_config=KvCacheConfig(
            tokens_per_block=options.tokens_per_block,
            enable_block_reuse=options.enable_block_reuse,
            enable_partial_reuse=options.enable_partial_reuse,
        ),
        kv_connector_config=options.connector,
    )


def _intake(options: EngineOptions, ranks: Ranks, inbox: Inbox | None) -> Intake:
    if options.enable_attention_dp:
        return DealtIntake(ranks, inbox)
    if ranks.size > 1 or inbox is None:
        return SharedIntake(ranks, inbox)
    return inbox

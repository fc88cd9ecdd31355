"""The options of an engine, as data that travels to each of its ranks; free of torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvray.errors import ConfigError

RUNTIMES = ("1.2", "main")
COLLECTIVE_TIMEOUT_MIN_S = 2.0
_AT_LEAST_ONE = (
    "tokens_per_block",
    "blocks_per_step",
    "num_blocks",
    "max_batch_size",
    "num_threads",
    "ranks_per_node",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConnectorConfig:
    """The names of a connector's classes, by default kvray's; 1.1 and 1.2 take nothing else."""

    connector_module: str = "kvray.connector"
    connector_scheduler_class: str = "KvRayScheduler"
    connector_worker_class: str = "KvRayWorker"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of `ReferenceEngine`; ConfigError if one is out of range."""

    model: str | Path = "smollm2"
    """Or random weights, `tiny`, `llama-3-8b`, `tiny:SEED`; or the path of a Llama-family
    checkpoint: a directory, a .gguf file."""
    device: str = "cpu"  # or `cuda`, `cuda:1`: where weights and pool are
    tokens_per_block: int = 32
    blocks_per_step: int = 1
    """Blocks whose rows the model always computes together: more make long prompts faster."""
    num_blocks: int = 128
    connector: KvConnectorConfig | Any | None = None
    """An object with the three fields of `KvConnectorConfig`."""
    enable_block_reuse: bool = True  # requests reuse full blocks of earlier ones
    enable_partial_reuse: bool = False  # and copy the first tokens of a block
    enable_chunked_prefill: bool = False  # a prompt may be computed in several passes
    chunk_tokens: int | None = None  # with it, the longest piece of a prompt in one pass
    overlap: bool = False  # sample one pass late, as TensorRT-LLM does by default
    max_draft_len: int = 0  # tokens drafted for a request in one pass; 0: no drafts
    max_batch_size: int = 8  # the most requests in one pass
    event_buffer_max_size: int = 0  # events of the pool that wait to be taken; 0: none are made
    poison: bool = False  # make every byte that nobody wrote NaN
    num_threads: int = 2  # torch's, on each rank; equal answers need equal numbers
    tensor_parallel_size: int = 1
    """Ranks that share the model: 1, 2 or 4. They are this process and children that end with it,
    each with a pool and a worker of its own."""
    enable_attention_dp: bool = False
    """The ranks share the requests instead: each runs its own, dealt round-robin, over whole
    weights. (TensorRT-LLM keeps a dense MLP whole then, too.)"""
    collective_timeout_s: float = 60.0  # how late one rank may be before all others fail
    runtime: str = "1.2"  # the line of TensorRT-LLM to follow where they differ, or `main`
    ranks_per_node: int | None = None  # as the connector is told; None: it is not
    rank_env: Sequence[Mapping[str, str]] = ()
    """Variables of each rank from 1 on besides those of this process."""

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        chunk, size = self.pass_chunk_tokens, self.tokens_per_block
        ranks = self.tensor_parallel_size
        wrong = {
            f"chunk_tokens is {chunk}; it must be a multiple of tokens_per_block ({size}).": (
                chunk is not None and (chunk < size or chunk % size)
            ),
            f"max_draft_len is {self.max_draft_len}; it must be at least 0.": (
                self.max_draft_len < 0
            ),
            "max_draft_len and overlap exclude each other: drafts continue a request's newest"
            " token, which overlap does not know yet when a pass begins.": (
                self.max_draft_len and self.overlap
            ),
            f"tensor_parallel_size is {ranks}; it must be 1, 2 or 4.": ranks not in (1, 2, 4),
            f"tensor_parallel_size is {ranks} and device is {self.device!r}; ranks share a model on"
            " the CPU only.": self.device != "cpu" and ranks > 1,
            "event_buffer_max_size and enable_attention_dp exclude each other here: the events of"
            " the other ranks' pools are not gathered.": (
                self.event_buffer_max_size and self.enable_attention_dp
            ),
            f"collective_timeout_s is {self.collective_timeout_s}; it must be at least"
            f" {COLLECTIVE_TIMEOUT_MIN_S}, as an idle engine's ranks meet once a second.": (
                self.collective_timeout_s < COLLECTIVE_TIMEOUT_MIN_S
            ),
            f"rank_env has variables for {len(self.rank_env)} ranks; give them for each of the"
            f" {ranks - 1} from rank 1 on.": self.rank_env and len(self.rank_env) != ranks - 1,
            f"runtime is {self.runtime!r}; give one of {', '.join(RUNTIMES)}.": (
                self.runtime not in RUNTIMES
            ),
        }
        for sentence, is_wrong in wrong.items():
            if is_wrong:
                raise ConfigError(sentence)

    @property
    def pass_chunk_tokens(self) -> int | None:
        """The longest piece of a prompt in one pass; None for whole prompts."""
        if not self.enable_chunked_prefill:
            return None
        return 4 * self.tokens_per_block if self.chunk_tokens is None else self.chunk_tokens

    @property
    def is_split(self) -> bool:
        """Whether the ranks share the model, and so wait for each other inside a pass."""
        return self.tensor_parallel_size > 1 and not self.enable_attention_dp

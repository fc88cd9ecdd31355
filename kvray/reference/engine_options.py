"""The arguments of an engine as data that travels to each of its ranks; free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvray.errors import ConfigError
from kvray.reference.llm_args import KvConnectorConfig

RUNTIMES = ("1.2", "main")
COLLECTIVE_TIMEOUT_MIN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The arguments of `ReferenceEngine`, which describes them.

    Raises:
        ConfigError: one is out of range.
    """

    model: str | Path
    tokens_per_block: int
    num_blocks: int
    connector: KvConnectorConfig | Any | None
    enable_block_reuse: bool
    enable_partial_reuse: bool
    enable_chunked_prefill: bool
    chunk_tokens: int | None
    overlap: bool
    max_batch_size: int
    pad_batch_size: int
    poison: bool
    cache_dir: Path | None
    num_threads: int
    tensor_parallel_size: int
    enable_attention_dp: bool
    collective_timeout_s: float
    runtime: str
    ranks_per_node: int | None
    rank_env: Sequence[Mapping[str, str]]

    def __post_init__(self) -> None:
        for name in ("tokens_per_block", "num_blocks", "max_batch_size", "num_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        chunk, size = self.pass_chunk_tokens, self.tokens_per_block
        if chunk is not None and (chunk < size or chunk % size):
            raise ConfigError(
                f"chunk_tokens is {chunk}; it must be a multiple of tokens_per_block ({size})."
            )
        if self.tensor_parallel_size not in (1, 2, 4):
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size}; it must be 1, 2 or 4."
            )
        if self.collective_timeout_s < COLLECTIVE_TIMEOUT_MIN_S:
            raise ConfigError(
                f"collective_timeout_s is {self.collective_timeout_s}; it must be at least "
                f"{COLLECTIVE_TIMEOUT_MIN_S}, as an idle engine's ranks meet once a second."
            )
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigError(f"ranks_per_node is {self.ranks_per_node}; it must be at least 1.")
        if self.rank_env and len(self.rank_env) != self.tensor_parallel_size - 1:
            raise ConfigError(
                f"rank_env has variables for {len(self.rank_env)} ranks; give them for each of the"
                f" {self.tensor_parallel_size - 1} from rank 1 on."
            )
        if self.runtime not in RUNTIMES:
            raise ConfigError(f"runtime is {self.runtime!r}; give one of {', '.join(RUNTIMES)}.")

    @property
    def pass_chunk_tokens(self) -> int | None:
        """The longest piece of a prompt in one pass; None for whole prompts."""
        if not self.enable_chunked_prefill:
            return None
        return 4 * self.tokens_per_block if self.chunk_tokens is None else self.chunk_tokens


def encode_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `ReferenceEngine` as what JSON can say."""
    encoded: dict[str, Any] = {
        key: str(value) if isinstance(value, Path) else value for key, value in options.items()
    }
    connector = options.get("connector")
    if connector is not None:
        encoded["connector"] = [
            connector.connector_module,
            connector.connector_scheduler_class,
            connector.connector_worker_class,
        ]
    return encoded


def decode_options(encoded: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `ReferenceEngine` that came as JSON."""
    options = dict(encoded)
    if options.get("connector") is not None:
        module, scheduler_class, worker_class = options["connector"]
        options["connector"] = KvConnectorConfig(
            connector_module=module,
            connector_scheduler_class=scheduler_class,
            connector_worker_class=worker_class,
        )
    if options.get("cache_dir") is not None:
        options["cache_dir"] = Path(options["cache_dir"])
    return options

"""A rank's half of the connector: vLLM's pool and passes as a rank's worker knows them."""

from collections import Counter
from typing import Any

import torch

from kvray.engine.engine_identity import EngineIdentity
from kvray.engine.rank import RankWorker
from kvray.engine.shared_state import SharedState
from kvray.errors import ConfigError
from kvray.vllm.held import HeldBlocks
from kvray.vllm.layout import read_layout
from kvray.vllm.metadata import HoldAnswers, PassMetadata, PoolMetadata


class RankHalf:
    """Used by the thread that runs the model."""

    def __init__(self, shared: SharedState, kv_cache_config: Any) -> None:
        self._rank = RankWorker(shared)
        self._kv_cache_config = kv_cache_config
        self._device = torch.device("cpu")
        self._numbers: dict[str, int] = {}
        """Requests of which blocks are being saved, or have been -> their numbers."""
        self._names: dict[int, str] = {}
        self._registered: PoolMetadata | None = None
        self._held: HeldBlocks | None = None

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the rank's cache, a tensor a layer; ConfigError: kvray cannot serve it."""
        layout = read_layout(kv_caches, self._kv_cache_config)
        self._device = next(iter(kv_caches.values())).device
        self._rank.register(layout)
        shared, pool = self._rank.shared, self._rank.pool
        args = shared.args
        assert pool is not None, "it was just opened"
        (part,) = layout.parts(args.part_rank, args.num_parts_ranks, args.tokens_per_block)
        room = shared.config.connector.hold // part.block_bytes
        if not room:
            raise ConfigError(
                f"connector.hold is less than one block, which has {part.block_bytes} bytes; raise"
                " it."
            )
        num_blocks = min(room, int(self._kv_cache_config.num_blocks))
        self._held = HeldBlocks(shared, pool, part, num_blocks=num_blocks)
        identity = EngineIdentity.of(args, layout)
        self._registered = PoolMetadata(identity=identity, hold_blocks=num_blocks)

    def registered(self) -> PoolMetadata:
        """Return what the scheduler must know of the registered pool."""
        assert self._registered is not None, "vLLM asks for it after the registration"
        return self._registered

    def prepare(self, metadata: Any) -> None:
        """Have the coming pass wait for what still uses its blocks, and begin to hold others."""
        if not isinstance(metadata, PassMetadata) or self._held is None:
            return
        self._rank.fence(metadata.meta, self._stream())
        are_ours = not metadata.holds or self._rank.shared.pool.may_load(metadata.meta)
        self._held.begin(metadata.holds, metadata.drops, are_ours=are_ours)

    def begin(self, metadata: Any) -> None:
        """Load what the pass was promised, and note what it fills."""
        if isinstance(metadata, PassMetadata) and self._held is not None:
            self._names |= metadata.names
            self._numbers |= {name: number for number, name in metadata.names.items()}
            self._rank.fence(metadata.meta, self._stream())
            for one in metadata.loads:
                self._held.load(one, self._stream())
            self._rank.begin(metadata.meta, self._stream())

    def end(self) -> None:
        """Save what the pass has filled; what else it raises must end the engine."""
        self._rank.end(self._stream())
        for error in self._rank.failed:
            raise error

    def answers(self) -> HoldAnswers | None:
        """Return what this rank holds since the last call."""
        held = {} if self._held is None else self._held.answers()
        return HoldAnswers(Counter(dict.fromkeys(held, 1)), held) if held else None

    def read_ended(self, finished: set[str]) -> set[str]:
        """Return the requests, of these and of earlier ones, whose blocks are read no more.

        They are those of which the scheduler's half has had blocks kept: saved, and on a device.
        vLLM has forgotten all others.
        """
        numbers = [self._numbers.pop(name) for name in finished if name in self._numbers]
        return {self._names.pop(number) for number in self._rank.read_ended(numbers)}

    def close(self) -> None:
        """Flush saves for a bounded time and let go of the tier. Twice is fine."""
        if self._held is not None:
            self._held.close()
        self._rank.close()

    def _stream(self) -> Any:
        """Return the stream that the model runs on; None on the host."""
        return None if self._device.type == "cpu" else torch.cuda.current_stream(self._device)

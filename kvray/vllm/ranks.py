"""A rank's half of the connector: vLLM's pool and passes as a rank's worker knows them."""

from typing import Any

import torch

from kvray.engine.rank import RankWorker
from kvray.engine.registered_pool import PoolFacts
from kvray.engine.shared_state import SharedState
from kvray.vllm.layout import read_layout
from kvray.vllm.metadata import PassMetadata


class RankHalf:
    """Used by the thread that runs the model."""

    def __init__(self, shared: SharedState, kv_cache_config: Any) -> None:
        self._rank = RankWorker(shared)
        self._kv_cache_config = kv_cache_config
        self._device = torch.device("cpu")
        self._numbers: dict[str, int] = {}
        """Requests of which blocks are being saved, or have been -> their numbers."""
        self._names: dict[int, str] = {}
        self._facts: PoolFacts | None = None

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the rank's cache, a tensor a layer; ConfigError: kvray cannot serve it."""
        layout = read_layout(kv_caches, self._kv_cache_config)
        self._device = next(iter(kv_caches.values())).device
        self._rank.register(layout)
        self._facts = PoolFacts.of(self._rank.shared.args, layout)

    def facts(self) -> PoolFacts:
        """Return what the leader must know of the registered pool."""
        assert self._facts is not None, "vLLM asks for it after the registration"
        return self._facts

    def fence(self, metadata: Any) -> None:
        """Have the coming pass wait for what still reads or writes its blocks."""
        if isinstance(metadata, PassMetadata):
            self._rank.fence(metadata.meta, self._stream())

    def begin(self, metadata: Any) -> None:
        """Load what the pass was promised, and note what it fills."""
        if isinstance(metadata, PassMetadata):
            self._names |= metadata.names
            self._numbers |= {name: number for number, name in metadata.names.items()}
            self._rank.begin(metadata.meta, self._stream())

    def end(self) -> None:
        """Save what the pass has filled, unless what it loaded may be wrong."""
        self._rank.end(self._stream())

    def read_ended(self, finished: set[str]) -> set[str]:
        """Return the requests, of these and of earlier ones, whose blocks are read no more.

        They are those of which the scheduler's half has had blocks kept: saved, and on a device.
        vLLM has forgotten all others.
        """
        numbers = [self._numbers.pop(name) for name in finished if name in self._numbers]
        return {self._names.pop(number) for number in self._rank.read_ended(numbers)}

    def take_failed(self) -> set[int]:
        """Return the blocks that do not have what was promised, each once.

        vLLM computes them again, or fails their requests (`kv_load_failure_policy`).
        """
        shared, blocks = self._rank.shared, set[int]()
        while self._rank.failed:
            plan, error = self._rank.failed.pop()
            if plan is None:
                raise error
            shared.boundary.stop("a load", error)
            shared.figures.totals["failed_loads"] += 1
            blocks |= set(plan.pages[0].ids().tolist())
        return blocks

    def close(self) -> None:
        """Flush saves for a bounded time and let go of the tier. Twice is fine."""
        self._rank.close()

    def _stream(self) -> Any:
        """Return the stream that the model runs on; None on the host."""
        return None if self._device.type == "cpu" else torch.cuda.current_stream(self._device)

"""vLLM's connector class, which hands each call to the half that the process asked for.

vLLM makes one for its scheduler and one for each rank, mostly in processes of their own. Source:
`vllm/distributed/kv_transfer/kv_connector/v1/base.py` of vLLM 0.32.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kvray.engine.engine_args import field_of
from kvray.engine.rank import RankWorker
from kvray.engine.shared_state import SharedState, shut_down_at_exit
from kvray.errors import ConfigError
from kvray.vllm.held import HeldBlocks
from kvray.vllm.read import read_layout
from kvray.vllm.scheduling import SchedulingHalf
from kvray.vllm.start import HoldAnswers, PassMetadata, PoolMetadata, state_for


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
        self._registered = PoolMetadata(identity=shared.identity, hold_blocks=num_blocks)

    def registered(self) -> PoolMetadata:
        """Return what the scheduler must know of the registered pool."""
        assert self._registered is not None, "vLLM asks for it after the registration"
        return self._registered

    def prepare(self, metadata: Any) -> None:
        """Have the coming pass wait for what still uses its blocks, and begin to hold others."""
        if not isinstance(metadata, PassMetadata) or self._held is None:
            return
        self._rank.fence(metadata.meta, self._stream())
        are_ours = not metadata.holds or self._rank.shared.may_load(metadata.meta)
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


class KvRayConnector(KVConnectorBase_V1):
    """`kv_connector` of vLLM's `KVTransferConfig`, found by `kv_connector_module_path`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Attach to the node's tier if there is one; ConfigError: a setting cannot be used."""
        super().__init__(vllm_config, role, kv_cache_config)
        shared = state_for(vllm_config, kv_cache_config)
        self._half: SchedulingHalf | RankHalf
        self._scheduler: SchedulingHalf
        self._worker: RankHalf  # the one or the other, as vLLM calls
        if role == KVConnectorRole.SCHEDULER:
            events = field_of(vllm_config, "kv_events_config")
            is_told = bool(field_of(events, "enable_kv_cache_events"))
            self._half = self._scheduler = SchedulingHalf(shared, tells_events=is_told)
        else:
            self._half = self._worker = RankHalf(shared, kv_cache_config)
        shut_down_at_exit(self)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not saved is computed again."""
        return False

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens after vLLM's own are promised; they are loaded in the next pass.

        None: the shard has been asked for more, or the ranks do not hold all of it yet; vLLM is to
        ask again.
        """
        return self._scheduler.match(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Keep the promise if vLLM takes it, release it if it does not."""
        self._scheduler.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return what the ranks hold, load and save with the coming pass."""
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the ranks hold by now."""
        answers = connector_output.kv_connector_worker_meta
        if isinstance(answers, HoldAnswers):
            self._scheduler.take_answers(answers)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether a save still reads the blocks of the finished request, and its hits.

        They are in vLLM's answer, as `kv_transfer_params`.
        """
        is_read, num_hit = self._scheduler.finish(request.request_id)
        return is_read, {"kvray_hit_tokens": num_hit}

    def reset_cache(self) -> bool:
        """Share nothing until a version is named: who asks for this may have replaced the weights.

        vLLM calls it for `reset_prefix_cache` with `reset_connector`, between two passes.
        """
        self._scheduler.reset()
        return True

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take vLLM's own blocks; called once, before the first request."""
        self._scheduler.watch(gpu_block_pool)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the rank's KV cache, a tensor a layer; ConfigError: kvray cannot serve it."""
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what this rank has registered; the scheduler's half waits for it."""
        return self._worker.registered()

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take what the ranks have registered, by rank; ConfigError: kvray cannot serve it."""
        self._scheduler.lead(metadata)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Have the pass wait for saves that read blocks it may write; called before each pass.

        What is to be held is copied beside it.
        """
        self._worker.prepare(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what the bound metadata promises."""
        self._worker.begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: the pass waits for all loads, so that graphs need no hook."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: a block is saved whole, after the pass."""

    def wait_for_save(self) -> None:
        """Save the blocks that the pass filled; blocks in host memory are read when it returns."""
        self._worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the finished requests whose blocks are read no more."""
        return self._worker.read_ended(finished_req_ids), None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what this rank holds since the last pass."""
        return self._worker.answers()

    def take_events(self) -> Iterable[Any]:
        """Return what has come to the node's memory and what has left it, for vLLM's publisher."""
        return self._scheduler.take_events()

    def shutdown(self) -> None:
        """Let go of the tier. Twice is fine."""
        self._half.close()

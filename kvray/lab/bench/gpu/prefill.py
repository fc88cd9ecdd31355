"""Time to the first token of a prompt: computed, or loaded from an arena but for its last block."""

import numpy as np
import torch
from numpy.random import default_rng

from kvray.engine.device.pool import Load
from kvray.errors import KVRayError
from kvray.identity.keys import chain_keys, request_seed
from kvray.lab.bench.gpu.copies import open_pool
from kvray.lab.bench.gpu.device import GpuDevice
from kvray.lab.bench.gpu.model import Model, Shapes
from kvray.lab.bench.report import Row
from kvray.lab.bench.runner import Duration, measure, median_s, reserve_all, speed_ratio
from kvray.store import Arena

_SEED = request_seed(b"kvray bench gpu prefill")
_POISON = 0xFF
"""A float of such bytes is NaN, which shows that a page was read before it was loaded."""
_LIKENESS = 0.98
"""Cosine of both ways' logits at least: the two sum in different orders."""


class Prefill:
    """A model, its pool, and the KV of one long prompt in an arena.

    The prompt has `tokens_max` tokens, a multiple of a block's, and is computed and stored first.

    Raises:
        KVRayError: the arena has no room.
    """

    def __init__(self, device: GpuDevice, arena: Arena, shapes: Shapes, *, tokens_max: int) -> None:
        self._device = device
        self._arena = arena
        self._share = shapes.tokens_per_block
        num_blocks = tokens_max // self._share
        rng = default_rng(0)
        self._tokens: list[int] = rng.integers(0, shapes.vocabulary, tokens_max).tolist()
        self._on_device = torch.tensor(self._tokens, device=device.device)
        self._page_ids = rng.permutation(num_blocks)
        self._pages = torch.from_numpy(self._page_ids).to(device.device)
        with device.on(device.stream):
            self._model = Model(shapes, device.device)
            self._cache = torch.zeros(
                (num_blocks, *shapes.page_shape), dtype=shapes.dtype, device=device.device
            )
        self._bytes = self._cache.view(torch.uint8).reshape(num_blocks, -1)
        self.pool, self._part = open_pool(self._bytes, arena, shapes.num_layers)
        self._store()

    def take(self, num_tokens: int, pairs: int) -> Row:
        """Measure one length of prompt.

        Raises:
            KVRayError: loaded blocks give other logits than computed ones.
        """
        self._check(num_tokens)
        measured = measure(
            pairs,
            ours=lambda _: self._time(num_tokens, is_loaded=True),
            floor=lambda _: self._time(num_tokens, is_loaded=False),
        )
        loaded = 1000 * median_s([pair.ours for pair in measured])
        cold = 1000 * median_s([pair.floor for pair in measured])
        ratio, name = speed_ratio(measured), name_of(num_tokens)
        return Row(
            title=f"first token of {num_tokens:,} tokens, loaded or computed",
            unit="ms",
            ours=loaded,
            floor=cold,
            ratio=ratio,
            figures={
                f"ttft_loaded_ms_{name}": loaded,
                f"ttft_cold_ms_{name}": cold,
                f"ttft_ratio_{name}": ratio,
            },
        )

    def _time(self, num_tokens: int, *, is_loaded: bool) -> Duration:
        self._poison()
        run = self._loaded if is_loaded else self._computed
        with self._device.on(self._device.stream):
            return self._device.time(lambda: run(num_tokens).argmax().item())

    def _computed(self, num_tokens: int) -> torch.Tensor:
        return self._model.prefill(self._on_device[:num_tokens], 0, self._cache, self._pages)

    def _loaded(self, num_tokens: int) -> torch.Tensor:
        """Return the logits after a prompt, of which all blocks but the last are loaded."""
        pool, stream, arena = self.pool, self._device.stream, self._arena
        keys = chain_keys(self._tokens[: num_tokens - 1], tokens_per_block=self._share, seed=_SEED)
        leases = arena.lease(keys)
        if not leases or leases[0].num_slots < len(keys):
            raise KVRayError("A prompt of the bench is not in its arena; run it again.")
        slots = arena.leased_slots(leases[0]).astype(np.int64)
        pool.fence(stream)
        loads = [Load(self._part, slots, self._page_ids[: len(keys)])]
        ticket = pool.load(arena, loads, stream)
        logits = self._model.prefill(
            self._on_device[:num_tokens],
            len(keys) * self._share,
            self._cache,
            self._pages[: -(-num_tokens // self._share)],
            before_layer=lambda layer: pool.wait_for_layer(layer, stream),
        )
        pool.mark(stream)
        ticket.wait()
        arena.release(*leases)
        return logits

    def _store(self) -> None:
        """Compute the whole prompt and save its blocks."""
        arena, pool, num_tokens = self._arena, self.pool, len(self._tokens)
        keys = chain_keys(self._tokens, tokens_per_block=self._share, seed=_SEED)
        made = reserve_all(arena, keys, block_bytes=self._part.block_bytes)
        with self._device.on(self._device.stream):
            self._computed(num_tokens)
        mark = pool.mark(self._device.stream)
        slots = made.slots.astype(np.int64)
        pool.save(arena, self._part, self._page_ids[made.rows], slots, mark).wait()
        arena.commit(made, arena.sums(made))

    def _poison(self) -> None:
        """Overwrite every page, so that a page that is not loaded or computed shows."""
        self.pool.fence(self._device.stream)
        with self._device.on(self._device.stream):
            self._bytes.fill_(_POISON)

    def _check(self, num_tokens: int) -> None:
        with self._device.on(self._device.stream):
            self._poison()
            computed = self._computed(num_tokens).float()
            self._poison()
            loaded = self._loaded(num_tokens).float()
            likeness = torch.cosine_similarity(computed, loaded, dim=0).item()
        if not likeness >= _LIKENESS:  # also if it is NaN
            raise KVRayError(
                f"{num_tokens} tokens that were loaded give other logits than computed ones"
                f" (cosine {likeness:.3f}); report this."
            )


def name_of(num_tokens: int) -> str:
    """Return a number of tokens as in the figures' names: 8192 is 8k."""
    return f"{num_tokens // 1024}k" if num_tokens % 1024 == 0 else str(num_tokens)


def crossover(ratios: dict[int, float]) -> int | None:
    """Return the prompt length from which on loading is faster; None: it never is.

    `ratios` has the computed time over the loaded time of each length.
    """
    found = None
    for num_tokens in sorted(ratios, reverse=True):
        if ratios[num_tokens] <= 1:
            break
        found = num_tokens
    return found

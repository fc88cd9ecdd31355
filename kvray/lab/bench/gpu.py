"""`kvray bench gpu`: loads and saves of a GPU's KV cache, and prompts loaded or computed.

A prompt is loaded from an arena but for its last block. A decoder like Llama's with random weights
makes prefills of real cost.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as nn
from numpy.random import default_rng

from kvray.config import format_size, load_config
from kvray.engine.device.pool import Load
from kvray.errors import KVRayError
from kvray.identity.keys import chain_keys, request_seed
from kvray.lab.bench.gpu_copies import BlockCopies, GpuDevice, open_pool
from kvray.lab.bench.report import Row, bench_report
from kvray.lab.bench.runner import (
    LARGE_BYTES,
    SMALL_BYTES,
    Duration,
    Runner,
    bench_spec,
    measure,
    median_s,
    require_room,
    reserve_all,
    speed_ratio,
)
from kvray.lab.report import Report
from kvray.store import Arena, ArenaSpec

_TABLES_BYTES = 128 * 2**20
_SPARE_BYTES = 2**30
"""Of the GPU's memory for its libraries."""
_SEED = request_seed(b"kvray bench gpu prefill")
_ROPE_BASE = 500_000.0
_NORM_EPSILON = 1e-5
_WEIGHT_SCALE = 0.02
_POISON = 0xFF
"""A float of such bytes is NaN, which shows that a page was read before it was loaded."""
_LIKENESS = 0.98
"""Cosine of both ways' logits at least: the two sum in different orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The sizes of a model and of its pages."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tokens_per_block: int
    dtype: torch.dtype

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of a page: layers, keys and values, heads, tokens, elements, as in TensorRT-LLM."""
        return (self.num_layers, 2, self.num_kv_heads, self.tokens_per_block, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of a page."""
        return torch.Size(self.page_shape).numel() * self.dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        kv, heads = self.num_kv_heads * self.head_dim, self.num_heads * self.head_dim
        layer = self.hidden * (2 * heads + 2 * kv + 3 * self.mlp)
        return (self.num_layers * layer + 2 * self.vocabulary * self.hidden) * self.dtype.itemsize


LLAMA_3_8B = Shapes(
    num_layers=32,
    hidden=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp=14336,
    vocabulary=128_256,
    tokens_per_block=32,
    dtype=torch.bfloat16,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuScale:
    """How much a run measures."""

    shapes: Shapes = LLAMA_3_8B
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    """Prompts, in tokens; each a multiple of a block's."""
    num_blocks: int = 256
    block_sizes: tuple[int, ...] = (LARGE_BYTES, SMALL_BYTES)
    pairs: int
    prefill_pairs: int

    @classmethod
    def fit(cls, *, repeat: int | None, quick: bool) -> "GpuScale":
        """Return the counts of a run with `repeat` pairs of each kind."""
        if quick:
            few = (64, 1024, 8192)
            return cls(lengths=few, pairs=repeat or 3, prefill_pairs=repeat or 1)
        return cls(pairs=repeat or 15, prefill_pairs=repeat or 5)

    def spec(self) -> ArenaSpec:
        """Return an arena with room for the largest measurement."""
        prompt = self.lengths[-1] // self.shapes.tokens_per_block * self.shapes.block_bytes
        copies = self.num_blocks * max(self.block_sizes)
        return bench_spec(max(prompt, copies) + _TABLES_BYTES)

    def check_memory(self, free_bytes: int) -> None:
        """Make sure that the model and its pages fit into the GPU's free memory.

        Raises:
            CapacityError: they do not.
        """
        shapes, num_tokens = self.shapes, self.lengths[-1]
        pages = num_tokens // shapes.tokens_per_block * shapes.block_bytes
        activations = num_tokens * 6 * shapes.mlp * shapes.dtype.itemsize  # at most, in its MLP
        needed = shapes.weight_bytes + pages + activations + _SPARE_BYTES
        hint = "end other programs there, or give --quick"
        require_room(needed, free_bytes, "the GPU's memory", hint)


def run(runner: Runner, *, config: Path | None, repeat: int | None, quick: bool) -> Report:
    """Measure the first GPU; as `measure_gpu`."""
    settings = load_config(config)
    scale, device = GpuScale.fit(repeat=repeat, quick=quick), GpuDevice("cuda:0")
    return measure_gpu(scale, device, arena_dir=settings.arena.dir, runner=runner)


def measure_gpu(scale: GpuScale, device: GpuDevice, *, arena_dir: Path, runner: Runner) -> Report:
    """Take all measurements.

    Raises:
        KVRayError: there is no room, or a step failed.
    """
    if device.is_gpu:
        scale.check_memory(int(torch.cuda.mem_get_info(device.device)[0]))
    runner.show("Starting", total=8 * len(scale.block_sizes) + len(scale.lengths))
    rows: list[Row] = []
    copied: Counter[str] = Counter()
    arena = runner.make_arena(runner.make_directory(arena_dir), scale.spec())
    arena.join("bench")

    def add(row: Row) -> None:
        rows.append(row)
        runner.show(f"Measured {row.title}")
        runner.advance()

    # One pool is open at a time, as memory is registered once; it is closed before the arena is.
    for block_bytes in scale.block_sizes:
        with runner.scope() as scope:
            copies = BlockCopies(
                device, arena, num_blocks=scale.num_blocks, block_bytes=block_bytes
            )
            scope.stack.callback(copies.close)
            for row in copies.take(scale.pairs):
                add(row)
            copied += copies.pool.copied_bytes
    with runner.scope() as scope:
        prefill = Prefill(device, arena, scale.shapes, tokens_max=scale.lengths[-1])
        scope.stack.callback(prefill.pool.close)
        for num_tokens in scale.lengths:
            add(prefill.take(num_tokens, scale.prefill_pairs))
        copied += prefill.pool.copied_bytes
    lengths = zip(scale.lengths, rows[-len(scale.lengths) :], strict=True)
    first = crossover({length: row.ratio or 0.0 for length, row in lengths})
    facts = {
        "gpu": torch.cuda.get_device_name(device.device) if device.is_gpu else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    how = ", ".join(f"{format_size(size)} {name}" for name, size in copied.items())
    faster = f"Loading is the faster way from {first:,} tokens on." if first else ""
    return bench_report(
        rows,
        note=f"{scale.num_blocks} blocks between an arena and a paged pool on {facts['gpu']} (torch"
        f" {facts['torch']}, CUDA {facts['cuda']}), bare work: one copy of as much pinned memory."
        " A prompt is loaded but for its last block, bare work: all of it is computed. Ratios are"
        f" medians over pairs of kvray's speed over that of the bare work.\nCopied: {how}.\n"
        + (faster or "Computing was the faster way at every length."),
        facts={
            "crossover_tokens": first,
            "copied_bytes": dict(copied),
            "blocks": scale.num_blocks,
            "pairs": scale.pairs,
            "prefill_pairs": scale.prefill_pairs,
            **facts,
        },
    )


class Model:
    """Random weights on a device, the same in every run; all norms' weights are 1."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.shapes = shapes
        generator = torch.Generator(device).manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            made = torch.empty(rows, columns, dtype=shapes.dtype, device=device)
            return made.normal_(std=_WEIGHT_SCALE, generator=generator)

        heads = shapes.num_heads * shapes.head_dim
        all_heads = heads + 2 * shapes.num_kv_heads * shapes.head_dim
        self._embedding = weight(shapes.vocabulary, shapes.hidden)
        self._head = weight(shapes.vocabulary, shapes.hidden)
        self._layers = [
            (
                weight(all_heads, shapes.hidden),
                weight(shapes.hidden, heads),
                weight(2 * shapes.mlp, shapes.hidden),
                weight(shapes.hidden, shapes.mlp),
            )
            for _ in range(shapes.num_layers)
        ]

    @torch.inference_mode()
    def prefill(
        self,
        tokens: torch.Tensor,
        start: int,
        pool: torch.Tensor,
        pages: torch.Tensor,
        before_layer: Callable[[int], None] = lambda layer: None,
    ) -> torch.Tensor:
        """Compute a prompt from `start` on; the KV of earlier tokens is in the pool.

        Args:
            tokens: the whole prompt, i64 [num_tokens].
            start: first token to compute.
            pool: pages, [num_pages, *page_shape]; those of the computed tokens are written.
            pages: the prompt's pages in order, i64 [num_blocks].
            before_layer: called with each layer before that layer reads its pages.

        Returns:
            The logits after the last token, [vocabulary].
        """
        places = torch.arange(start, len(tokens), device=tokens.device)
        angles = self._angles(places)
        sees = torch.arange(len(tokens), device=tokens.device) <= places[:, None] if start else None
        where = pages[places // self.shapes.tokens_per_block], places % self.shapes.tokens_per_block
        hidden = self._embedding[tokens[start:]]
        for layer, (in_heads, out_heads, up, down) in enumerate(self._layers):
            before_layer(layer)
            query, key, value = self._split(_norm(hidden) @ in_heads.T, angles)
            cache = pool[:, layer]
            cache[where[0], 0, :, where[1]] = key
            cache[where[0], 1, :, where[1]] = value
            if start:  # all keys and values of the prompt, [num_tokens, heads, head_dim] each
                key, value = cache[pages].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : len(tokens)]
            hidden = hidden + _attend(query, key, value, sees).flatten(1) @ out_heads.T
            gate, rest = (_norm(hidden) @ up.T).chunk(2, dim=-1)
            hidden = hidden + (nn.silu(gate) * rest) @ down.T
        return self._head @ _norm(hidden[-1])

    def _split(
        self, projected: torch.Tensor, angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys, rotated, and values, [num_tokens, heads, head_dim] each."""
        shapes = self.shapes
        heads = [shapes.num_heads, shapes.num_kv_heads, shapes.num_kv_heads]
        query, key, value = projected.view(len(projected), -1, shapes.head_dim).split(heads, dim=1)
        return _rotate(query, angles), _rotate(key, angles), value

    def _angles(self, places: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines of the rotation of each token, [2, num_tokens, 1, half]."""
        half = self.shapes.head_dim // 2
        steps = torch.arange(half, device=places.device, dtype=torch.float32) / half
        turned = places[:, None] * _ROPE_BASE**-steps
        return torch.stack((turned.cos(), turned.sin())).to(self.shapes.dtype)[:, :, None]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees: torch.Tensor | None
) -> torch.Tensor:
    """Return attention, [num_queries, heads, head_dim], as `query` is; keys have [num_tokens, ...].

    `sees` says which tokens each query sees, [num_queries, num_tokens]; None: those up to its own.
    """
    attend, share = nn.scaled_dot_product_attention, query.shape[1] // key.shape[1]
    query, key, value = (one.transpose(0, 1)[None] for one in (query, key, value))
    if sees is None:
        attended = attend(query, key, value, is_causal=True, enable_gqa=True)
    else:
        # The queries of all heads that share a key, one after the other: it is read once.
        query = query.unflatten(1, (-1, share)).flatten(2, 3)
        attended = attend(query, key, value, attn_mask=sees.repeat(share, 1))
        attended = attended.unflatten(2, (share, -1)).flatten(1, 2)
    return attended[0].transpose(0, 1)


def _norm(hidden: torch.Tensor) -> torch.Tensor:
    return nn.rms_norm(hidden, hidden.shape[-1:], eps=_NORM_EPSILON)


def _rotate(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    cos, sin = angles
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


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

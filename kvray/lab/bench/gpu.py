"""`kvray bench gpu`: copies of blocks between a GPU and an arena, and prompts loaded or computed.

Prompts are those of two reference engines with the same random weights, one of them with kvray's
connector and a shard of its own, without Ray. Each answer is compared token for token.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
import yaml
from numpy.random import default_rng

from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.shard import Shard
from kvray.config import CONFIG_ENV, environ_for, format_size, load_config
from kvray.errors import KVRayError
from kvray.lab.bench.gpu_copies import RANKS, BlockCopies, GpuDevice, wait_until_ready
from kvray.lab.bench.report import Row, bench_report, time_row
from kvray.lab.report import Report
from kvray.lab.runner import (
    LARGE_BYTES,
    LOCK_WAIT_S,
    SMALL_BYTES,
    Duration,
    Pair,
    Runner,
    bench_spec,
    is_soon,
    measure,
    require_room,
    speed_ratio,
    time_ratio,
)
from kvray.reference import KvConnectorConfig
from kvray.reference.checkpoint import RANDOM
from kvray.reference.engine import ReferenceEngine
from kvray.reference.model import Config, dtype_of, head_dim, weight_shapes
from kvray.reference.output import Output

_SPARE_BYTES = 2**30
"""Of the GPU's memory for its libraries."""
_TABLES_BYTES = 128 * 2**20
_TOKENS_PER_BLOCK = 32
_BLOCKS_PER_STEP = 8
"""Rows enough for a GPU to compute near its full speed."""
_CHUNK_TOKENS = 2048
_ANSWER_TOKENS = 4
_WAIT_S, _STORE_S, _POLL_S = 120.0, 5.0, 0.002
KINDS = ("copies", "prompts")
WRONG = "wrong_answers"
Tally = Counter[str]
"""Bytes by how they were copied, and answers unlike those of the engine without kvray."""
_TARGETS = {
    "gpu_h2d_ratio_4mib": 0.95,
    "gpu_d2h_ratio_4mib": 0.95,
    "gpu_h2d_ratio_128kib": 0.9,
    "gpu_d2h_ratio_128kib": 0.9,
    "gpu_h2d_ratio_resliced": 0.5,
    "gpu_resliced_over_plain": 1.3,
    "prefill_beside_saves_8k": 1.03,
    "ttft_ratio_8k": 5.0,
}
"""What is wanted; at most so much of the times over other times, at least so much of the rest."""
_AT_MOST = {"gpu_resliced_over_plain", "prefill_beside_saves_8k"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuScale:
    """How much a run measures."""

    model: str = "llama-3-8b"
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    """Prompts, in tokens; each a multiple of a block's."""
    num_blocks: int = 256
    block_sizes: tuple[int, ...] = (LARGE_BYTES, SMALL_BYTES)
    pairs: int
    prefill_pairs: int

    @classmethod
    def fit(cls, *, repeat: int | None, quick: bool) -> "GpuScale":
        """Return the counts of a run with `repeat` pairs of each kind."""
        if quick:
            few = (512, 1024, 8192)
            return cls(lengths=few, pairs=repeat or 3, prefill_pairs=repeat or 1)
        return cls(pairs=repeat or 15, prefill_pairs=repeat or 5)

    @property
    def prompt_bytes(self) -> int:
        """Bytes of the KV of the longest prompt and its answer."""
        return self.num_pages * block_bytes(RANDOM[self.model])

    @property
    def num_pages(self) -> int:
        """Blocks of the longest prompt and its answer."""
        return -(-(self.lengths[-1] + _ANSWER_TOKENS) // _TOKENS_PER_BLOCK)

    def check_memory(self, free_bytes: int) -> None:
        """Make sure that two models and their pages fit into the GPU's free memory.

        CapacityError: they do not.
        """
        config = RANDOM[self.model]
        weights = sum(map(prod, weight_shapes(config).values())) * dtype_of(config).itemsize
        # What a pass computes with, at most: of all its tokens in one layer.
        rows = min(_CHUNK_TOKENS, self.lengths[-1]) * config["intermediate_size"] * 8
        needed = 2 * (weights + self.prompt_bytes + rows) + _SPARE_BYTES
        hint = "end other programs there, or give --quick"
        require_room(needed, free_bytes, "the GPU's memory", hint)


def block_bytes(config: Config) -> int:
    """Return the bytes of a block of a model of random weights."""
    tokens = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim(config)
    return int(tokens * _TOKENS_PER_BLOCK * dtype_of(config).itemsize)


def run(runner: Runner, *, config: Path | None, repeat: int | None, quick: bool) -> Report:
    """Measure the first GPU; as `measure_gpu`."""
    settings = load_config(config)
    scale, device = GpuScale.fit(repeat=repeat, quick=quick), GpuDevice("cuda:0")
    return measure_gpu(scale, device, arena_dir=settings.arena.dir, runner=runner)


def measure_gpu(
    scale: GpuScale,
    device: GpuDevice,
    *,
    arena_dir: Path,
    runner: Runner,
    kinds: Collection[str] = KINDS,
) -> Report:
    """Take the measurements of `kinds`. KVRayError: there is no room, or a step failed."""
    if device.is_gpu:
        scale.check_memory(int(torch.cuda.mem_get_info(device.device)[0]))
    num_rows = {"copies": 8 * len(scale.block_sizes) + 2, "prompts": 2 * len(scale.lengths)}
    runner.show("Starting", total=sum(num_rows[kind] for kind in kinds))
    directory = runner.make_directory(arena_dir)
    rows, tally = list[Row](), Tally()
    measures = {"copies": _measure_copies, "prompts": _measure_prompts}
    for kind in kinds:
        with runner.scope() as scope:
            for row in measures[kind](scale, device, directory, scope, tally):
                rows.append(row)
                runner.show(f"Measured {row.title}")
                runner.advance()
    return _report(scale, device, rows, tally)


def _measure_copies(
    scale: GpuScale, device: GpuDevice, directory: Path, scope: Runner, tally: Tally
) -> Iterator[Row]:
    largest = max(scale.block_sizes)
    arena = scope.make_arena(directory, bench_spec(2 * scale.num_blocks * largest + _TABLES_BYTES))
    arena.join("bench")
    takes = [(size, BlockCopies.take) for size in scale.block_sizes]
    # One pool is open at a time, as memory is registered once.
    for size, take in [*takes, (largest // RANKS, BlockCopies.take_resliced)]:
        with scope.scope() as inner:
            copies = BlockCopies(device, arena, num_blocks=scale.num_blocks, block_bytes=size)
            inner.stack.callback(copies.close)
            yield from take(copies, scale.pairs)
            tally.update(copies.copied_bytes)


def _measure_prompts(
    scale: GpuScale, device: GpuDevice, directory: Path, scope: Runner, tally: Tally
) -> Iterator[Row]:
    prompts = _start_engines(scale, device, directory, scope, tally)
    for num_tokens in scale.lengths:
        yield from prompts.take(num_tokens, scale.prefill_pairs)


def _report(scale: GpuScale, device: GpuDevice, rows: list[Row], tally: Tally) -> Report:
    figures = {name: value for row in rows for name, value in row.figures.items()}
    names = {length: f"ttft_ratio_{name_of(length)}" for length in scale.lengths}
    ratios = {length: figures[name] for length, name in names.items() if name in figures}
    first = crossover(ratios)
    facts = {
        "gpu": torch.cuda.get_device_name(device.device) if device.is_gpu else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    targets = {}
    for name, wanted in _TARGETS.items():
        if (met := figures.get(name)) is not None:
            is_met = met <= wanted if name in _AT_MOST else met >= wanted
            targets[name] = {"wanted": wanted, "found": met, "is_met": is_met}
    missed = [
        f"{name} is {one['found']:.3g}, wanted {one['wanted']}"
        for name, one in targets.items()
        if not one["is_met"]
    ]
    copied, num_wrong = dict(tally), tally[WRONG]
    copied.pop(WRONG, None)
    how = ", ".join(
        f"{format_size(size)} {name.removeprefix('copied_bytes_')}" for name, size in copied.items()
    )
    faster = f"Loading is the faster way from {first:,} tokens on." if first else ""
    return bench_report(
        rows,
        note=f"{scale.num_blocks} blocks between an arena and a paged pool on {facts['gpu']} (torch"
        f" {facts['torch']}, CUDA {facts['cuda']}), bare work: one copy of as much pinned memory."
        " A prompt is loaded but for its last block, bare work: an engine without kvray computes"
        " all of it. Ratios are medians over pairs of kvray's speed over that of the bare work."
        + (f"\nCopied: {how}." if how else "")
        + "\n"
        + (faster or ("Computing was the faster way at every length." if ratios else ""))
        + (f"\n{num_wrong} answers were WRONG: report this." if num_wrong else "")
        + (f"\nTargets that were missed: {'; '.join(missed)}." if missed else ""),
        facts={
            "crossover_tokens": first,
            "wrong_answers": num_wrong,
            "targets": targets,
            "copied_bytes": copied,
            "blocks": scale.num_blocks,
            "pairs": scale.pairs,
            "prefill_pairs": scale.prefill_pairs,
            **facts,
        },
        has_failed=bool(num_wrong),
    )


def _start_engines(
    scale: GpuScale, device: GpuDevice, directory: Path, scope: Runner, tally: Tally
) -> "Prompts":
    """Start a shard, an engine with a connector and one without, which end with `scope`."""
    path = directory / "kvray.yaml"
    capacity = 2 * scale.prompt_bytes + _TABLES_BYTES
    arena = {"dir": str(directory), "capacity": capacity, "lock_wait_s": LOCK_WAIT_S}
    path.write_text(yaml.safe_dump({"arena": arena, "connector": {"model_key": "bench"}}))
    # Variables of this machine's own tier would lead shard and connector to its arena.
    given = dict(os.environ)
    os.environ.update(environ_for(path))
    scope.stack.callback(os.environ.update, given)
    scope.stack.callback(os.environ.pop, CONFIG_ENV)
    shard = Shard("bench", ShardSettings.of(load_config(path)))
    shard.start()
    scope.stack.callback(shard.stop, retire=True, timeout_s=_WAIT_S)
    is_soon(lambda: shard.status()["state"] in ("serving", "failed"), _WAIT_S)
    status = shard.status()
    if status["state"] != "serving":
        raise KVRayError(
            f"The bench's shard did not start: {status.get('message', status['state'])}"
        )
    connector = KvConnectorConfig(
        connector_scheduler_class=f"KvRayScheduler@{path}",
        connector_worker_class=f"KvRayWorker@{path}",
    )
    make = partial(
        ReferenceEngine,
        scale.model,
        device=str(device.device),
        tokens_per_block=_TOKENS_PER_BLOCK,
        blocks_per_step=_BLOCKS_PER_STEP,
        num_blocks=scale.num_pages + 1,
        enable_chunked_prefill=True,
        chunk_tokens=_CHUNK_TOKENS,
    )
    bare = scope.stack.enter_context(make(enable_block_reuse=False))
    ours = scope.stack.enter_context(make(connector=connector, poison=True))
    assert ours.connector is not None, "it has just been asked for"
    worker = ours.connector.worker
    wait_until_ready(worker._rank.pool, worker._rank.shared.link.arena)
    return Prompts(bare, ours, lambda: int(shard.status()["arena"]["stored"]), tally)


class Prompts:
    """Prompts of an engine with kvray and of one without, each of which computes them first."""

    def __init__(
        self,
        bare: ReferenceEngine,
        ours: ReferenceEngine,
        num_stored: Callable[[], int],
        tally: Tally,
    ) -> None:
        self._tally = tally
        self._bare = bare
        self._ours = ours
        self._num_stored = num_stored
        self._random = default_rng(0)

    def take(self, num_tokens: int, count: int) -> list[Row]:
        """Measure prompts of one length: loaded, and computed with their saves behind the passes.

        KVRayError: a prompt was not stored, or not loaded.
        """
        self._compare(num_tokens, 1)  # the first one sets things up
        cold, loaded = self._compare(num_tokens, count)
        name = name_of(num_tokens)
        computed = f"ttft_cold_ms_{name}"
        return [
            time_row(
                f"first token of {num_tokens:,} tokens, loaded or computed",
                (f"ttft_loaded_ms_{name}", computed, f"ttft_ratio_{name}"),
                loaded,
                ratio=speed_ratio(loaded),
            ),
            time_row(
                "    computed, and saved behind its passes",
                (f"ttft_saving_ms_{name}", computed, f"prefill_beside_saves_{name}"),
                cold,
                ratio=time_ratio(cold),
            ),
        ]

    def _store_rest(self, prompt: list[int], wanted: int) -> None:
        """Return once so many blocks are stored; a busy machine drops saves, so it asks again."""
        deadline = time.monotonic() + _WAIT_S
        while not is_soon(lambda: self._num_stored() >= wanted, _STORE_S, poll_s=_POLL_S):
            if time.monotonic() > deadline:
                raise KVRayError(f"Storing a prompt took more than {_WAIT_S:.0f} s; report this.")
            self._ours.reset_prefix_cache()
            self._answer(self._ours, prompt)

    def _compare(self, num_tokens: int, count: int) -> tuple[list[Pair], list[Pair]]:
        """Return pairs of computing, and of loading beside computing, in the same order."""
        size = self._bare.model.vocab_size
        cold, loaded = list[Pair](), list[Pair]()
        for index in range(count):
            prompt = self._random.integers(0, size, num_tokens).tolist()
            before = self._num_stored()
            pair, answers = self._computed(prompt, index)
            self._store_rest(prompt, before + num_tokens // _TOKENS_PER_BLOCK)
            self._ours.reset_prefix_cache()
            output = self._answer(self._ours, prompt)
            if output.hit_tokens < num_tokens - _TOKENS_PER_BLOCK:
                raise KVRayError(
                    f"Of {num_tokens} tokens that were stored only {output.hit_tokens} were loaded;"
                    " report this."
                )
            self._tally[WRONG] += len({*answers, output.token_ids}) - 1
            cold.append(pair)
            loaded.append(pair._replace(ours=Duration(output.ttft_s)))
        return cold, loaded

    def _computed(self, prompt: list[int], index: int) -> tuple[Pair, set[tuple[int, ...]]]:
        """Have both engines compute a prompt; return the times and the answers."""
        answers = set[tuple[int, ...]]()

        def answer(engine: ReferenceEngine, _: int) -> Duration:
            output = self._answer(engine, prompt)
            answers.add(output.token_ids)
            return Duration(output.ttft_s)

        ours, floor = partial(answer, self._ours), partial(answer, self._bare)
        (pair,) = measure(1, ours=ours, floor=floor, first=index)
        return pair, answers

    def _answer(self, engine: ReferenceEngine, prompt: list[int]) -> Output:
        output: Output = engine.generate(prompt, max_tokens=_ANSWER_TOKENS, timeout_s=_WAIT_S)
        return output


def name_of(num_tokens: int) -> str:
    """Return a number of tokens as in the figures' names: 8192 is 8k."""
    return f"{num_tokens // 1024}k" if num_tokens % 1024 == 0 else str(num_tokens)


def crossover(ratios: dict[int, float]) -> int | None:
    """Return the prompt length from which on loading is faster; None: it never is.

    `ratios` has the computed time over the loaded time of each length.
    """
    slow = max((one for one, ratio in ratios.items() if ratio <= 1), default=0)
    return min((one for one in ratios if one > slow), default=None)

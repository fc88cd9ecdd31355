"""`kvray bench gpu` on the host's memory with a tiny model: all of it but the calls to CUDA."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.progress import Progress

from kvray.console.interrupts import Interrupts
from kvray.engine.device.pool import HostPool
from kvray.errors import CapacityError, KVRayError
from kvray.lab.bench import gpu
from kvray.lab.bench.gpu import GpuScale, block_bytes, crossover, measure_gpu
from kvray.lab.bench.gpu_copies import GpuDevice
from kvray.lab.runner import running
from kvray.reference.checkpoint import RANDOM
from kvray.reference.engine import ReferenceEngine
from tests.forks import assert_refused

SCALE = GpuScale(
    model="tiny",
    lengths=(64, 1024),
    num_blocks=3,
    block_sizes=(4 * 2**20, 128 * 2**10),
    pairs=2,
    prefill_pairs=2,
)
CPU = GpuDevice("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would be measured")
def test_without_a_gpu_it_ends_with_one_sentence(run_kvray):
    assert_refused(run_kvray("bench", "gpu"), "finds no NVIDIA GPU here")


def test_a_run_gives_every_figure_and_leaves_nothing_behind_nor_uses_the_machine_s_own_tier(
    parent, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("KVRAY_ARENA__DIR", str(tmp_path / "none"))
    with running(Interrupts()) as runner:
        report = measure_gpu(SCALE, CPU, arena_dir=parent, runner=runner)
    assert list(parent.iterdir()) == []
    assert os.environ["KVRAY_ARENA__DIR"] == str(tmp_path / "none")
    figures = report.facts
    for way, size in itertools.product(("h2d", "d2h"), ("4mib", "128kib")):
        for suffix in ("", "_run", "_busy", "_run_busy"):
            assert figures[f"gpu_{way}_ratio_{size}{suffix}"] > 0
    assert figures["gpu_resliced_over_plain"] > 0
    for name in ("ttft_cold_ms", "ttft_loaded_ms", "prefill_beside_saves"):
        assert figures[f"{name}_64"] > 0
        assert figures[f"{name}_1k"] > 0
    assert figures["wrong_answers"] == 0
    assert (figures["gpu"], figures["torch"]) == ("cpu", torch.__version__)
    assert figures["crossover_tokens"] in (None, 64, 1024)
    target = figures["targets"]["gpu_h2d_ratio_4mib"]
    assert target["is_met"] == (target["found"] >= target["wanted"])
    report.show(as_json=False)
    text = capsys.readouterr().out
    assert "load, 4MiB blocks, pages in a row, beside matrix products" in text
    assert "first token of 1,024 tokens, loaded or computed" in text
    assert "16KiB pieces" in text


def test_an_interrupted_run_leaves_nothing_behind(parent, monkeypatch):
    def interrupt(self: Progress, *args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "advance", interrupt)
    with pytest.raises(KeyboardInterrupt), running(Interrupts()) as runner:
        measure_gpu(SCALE, CPU, arena_dir=parent, runner=runner)
    assert list(parent.iterdir()) == []


def prompts(parent: Path) -> gpu.Tally:
    tally = gpu.Tally()
    with running(Interrupts()) as runner:
        gpu._start_engines(SCALE, CPU, parent, runner, tally).take(1024, 1)
    return tally


def test_answers_after_blocks_that_are_wrong_are_counted(parent, monkeypatch):
    load = HostPool.load
    monkeypatch.setattr(
        HostPool, "load", lambda pool, arena, loads, stream: load(pool, arena, [], stream)
    )
    tally = prompts(parent)
    assert tally[gpu.WRONG] == 2
    report = gpu._report(SCALE, CPU, [], tally)
    assert report.has_failed
    assert "2 answers were WRONG" in str(report.parts)


def test_a_prompt_that_is_not_loaded_ends_the_run(parent, monkeypatch):
    monkeypatch.setattr(ReferenceEngine, "reset_prefix_cache", lambda _: None)
    with pytest.raises(KVRayError, match="only 0 were loaded"):
        prompts(parent)


def test_a_gpu_without_room_for_llama_3_8b_is_refused_with_the_sizes():
    assert block_bytes(RANDOM["llama-3-8b"]) == 4 * 2**20
    scale = GpuScale.fit(repeat=7, quick=False)
    assert (scale.pairs, scale.prefill_pairs, max(scale.lengths)) == (7, 7, 32768)
    with pytest.raises(CapacityError, match=r"takes 39.36GiB of the GPU's memory and 8GiB are"):
        scale.check_memory(8 * 2**30)
    GpuScale.fit(repeat=None, quick=True).check_memory(80 * 2**30)
    replace(scale, model="tiny").check_memory(2 * 2**30)


def test_crossover_is_the_length_from_which_on_loading_wins():
    assert crossover({64: 0.5, 128: 1.2, 256: 3.0}) == 128
    assert crossover({64: 2.0, 128: 0.9, 256: 3.0}) == 256
    assert crossover({64: 2.0, 128: 1.1}) == 64
    assert crossover({64: 0.5, 128: 0.9}) is None

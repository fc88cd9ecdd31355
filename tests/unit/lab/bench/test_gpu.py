"""`kvray bench gpu` on the host's memory with a tiny model: all of it but the calls to CUDA."""

import pytest
import torch
from rich.progress import Progress

from kvray.console.interrupts import Interrupts
from kvray.errors import CapacityError, KVRayError
from kvray.lab.bench.gpu import (
    LLAMA_3_8B,
    GpuScale,
    Model,
    Prefill,
    Shapes,
    crossover,
    measure_gpu,
    name_of,
)
from kvray.lab.bench.gpu_copies import GpuDevice
from kvray.lab.bench.runner import running
from tests.kit.devices import HostDevice, open_arena

TINY = Shapes(
    num_layers=2,
    hidden=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp=24,
    vocabulary=50,
    tokens_per_block=4,
    dtype=torch.float32,
)
SCALE = GpuScale(
    shapes=TINY,
    lengths=(8, 16, 64),
    num_blocks=3,
    block_sizes=(4 * 2**20, 128 * 2**10),
    pairs=2,
    prefill_pairs=1,
)


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvray.engine.device.gpu.CudaDevice", lambda _: HostDevice())


@pytest.fixture
def model() -> Model:
    return Model(TINY, torch.device("cpu"))


def pages(num_pages: int) -> torch.Tensor:
    return torch.full((num_pages, *TINY.page_shape), torch.nan)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would be measured")
def test_without_a_gpu_it_ends_with_one_sentence(run_kvray):
    done = run_kvray("bench", "gpu")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "finds no NVIDIA GPU here" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_gives_every_figure_and_leaves_nothing_behind(tmp_path, capsys):
    with running(Interrupts()) as runner:
        report = measure_gpu(SCALE, GpuDevice("cpu"), arena_dir=tmp_path, runner=runner)
    assert list(tmp_path.iterdir()) == []
    figures = report.facts
    for way in ("h2d", "d2h"):
        for size in ("4mib", "128kib"):
            for suffix in ("", "_run", "_busy", "_run_busy"):
                assert figures[f"gpu_{way}_ratio_{size}{suffix}"] > 0
    for length in (8, 16, 64):
        assert figures[f"ttft_cold_ms_{length}"] > 0
        assert figures[f"ttft_loaded_ms_{length}"] > 0
    assert figures["gpu"] == "cpu"
    assert figures["torch"] == torch.__version__
    assert sum(figures["copied_bytes"].values()) > 0
    assert figures["crossover_tokens"] in (None, 8, 16, 64)
    report.show(as_json=False)
    text = capsys.readouterr().out
    assert "load, 4MiB blocks, pages in a row, beside matrix products" in text
    assert "first token of 64 tokens, loaded or computed" in text


def test_an_interrupted_run_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(self: Progress, *args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "advance", interrupt)
    with pytest.raises(KeyboardInterrupt), running(Interrupts()) as runner:
        measure_gpu(SCALE, GpuDevice("cpu"), arena_dir=tmp_path, runner=runner)
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_computed_in_two_steps_gives_what_it_gives_in_one(model):
    tokens, order = torch.arange(10), torch.tensor([2, 0, 1])
    whole, split = pages(3), pages(3)
    expected = model.prefill(tokens, 0, whole, order)
    model.prefill(tokens[:8], 0, split, order)
    found = model.prefill(tokens, 8, split, order)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(whole, split, atol=1e-5, equal_nan=True)
    assert whole[1, :, :, :, 2:].isnan().all(), "the last block holds two tokens"


def test_layers_are_announced_before_they_read_their_pages(model):
    tokens, order = torch.arange(8), torch.tensor([1, 0])
    full, late = pages(2), pages(2)
    expected = model.prefill(tokens, 4, _computed(model, tokens, full, order), order)

    def land(layer: int) -> None:
        late[1, layer] = full[1, layer]

    assert torch.allclose(model.prefill(tokens, 4, late, order, before_layer=land), expected)


def _computed(
    model: Model, tokens: torch.Tensor, pool: torch.Tensor, order: torch.Tensor
) -> torch.Tensor:
    model.prefill(tokens, 0, pool, order)
    return pool


def test_loaded_bytes_that_are_wrong_end_the_run(monkeypatch):
    with open_arena(capacity=2**22, slab=2**20) as arena:
        prefill = Prefill(GpuDevice("cpu"), arena, TINY, tokens_max=16)
        monkeypatch.setattr(prefill.pool, "load", _load_nothing(prefill))
        with pytest.raises(KVRayError, match="other logits"):
            prefill.take(16, 1)
        prefill.pool.close()


def _load_nothing(prefill: Prefill):  # type: ignore[no-untyped-def]
    load = prefill.pool.load
    return lambda arena, loads, stream: load(arena, [], stream)


def test_the_model_of_the_benchmark_has_the_shapes_of_llama_3_8b():
    assert LLAMA_3_8B.block_bytes == 4 * 2**20
    assert LLAMA_3_8B.weight_bytes == pytest.approx(16.06e9, rel=0.01)


def test_a_gpu_without_room_for_the_model_is_refused_with_the_sizes():
    with pytest.raises(CapacityError, match=r"GiB of the GPU's memory and 8GiB are free"):
        GpuScale.fit(repeat=None, quick=False).check_memory(8 * 2**30)
    GpuScale.fit(repeat=None, quick=True).check_memory(80 * 2**30)


def test_counts_follow_the_options():
    scale = GpuScale.fit(repeat=7, quick=False)
    assert (scale.pairs, scale.prefill_pairs) == (7, 7)
    assert max(scale.lengths) == 32768
    assert max(GpuScale.fit(repeat=None, quick=True).lengths) == 8192


def test_crossover_is_the_length_from_which_on_loading_wins():
    assert crossover({64: 0.5, 128: 1.2, 256: 3.0}) == 128
    assert crossover({64: 2.0, 128: 0.9, 256: 3.0}) == 256
    assert crossover({64: 2.0, 128: 1.1}) == 64
    assert crossover({64: 0.5, 128: 0.9}) is None


def test_lengths_are_named_in_thousands():
    assert [name_of(length) for length in (512, 1024, 8192)] == ["512", "1k", "8k"]

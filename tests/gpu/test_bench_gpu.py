"""`kvray bench gpu` on a real GPU, with a small model."""

import tempfile
from pathlib import Path

import pytest
import torch

from kvray.console.interrupts import Interrupts
from kvray.engine.device.cuda_device import BATCHED, GATHERED, SINGLE
from kvray.lab.bench.gpu import GpuScale, measure_gpu
from kvray.lab.bench.gpu_copies import GpuDevice
from kvray.lab.runner import running

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_a_small_run_gives_every_figure():
    scale = GpuScale(model="tiny", lengths=(512, 1024), num_blocks=16, pairs=2, prefill_pairs=2)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvray-test-") as directory:
        with running(Interrupts()) as runner:
            device = GpuDevice("cuda:0")
            report = measure_gpu(scale, device, arena_dir=Path(directory), runner=runner)
        assert list(Path(directory).iterdir()) == []
    figures = report.facts
    assert figures["gpu_h2d_ratio_4mib"] > 0.1
    assert figures["gpu_d2h_ratio_128kib_busy"] > 0.1
    assert figures["ttft_loaded_ms_1k"] > 0
    assert figures["gpu_resliced_over_plain"] > 0
    assert figures["wrong_answers"] == 0
    assert set(figures["copied_bytes"]) <= {BATCHED, SINGLE, GATHERED}
    assert figures["gpu"] == torch.cuda.get_device_name(0)

"""CUDA opens devices and starts threads at its first uses; here, so that no test is blamed."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _gpu_is_warm() -> Iterator[None]:
    if torch.cuda.is_available():
        matrix = torch.ones(256, 256, device="cuda")
        torch.mm(matrix, matrix)
        torch.zeros(2**20, pin_memory=True).cuda(non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.Stream())
        event.synchronize()
        torch.cuda.synchronize()
    return

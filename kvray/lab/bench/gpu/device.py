"""The device that `kvray bench gpu` measures; tests use the host's memory."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvray.errors import ConfigError
from kvray.lab.bench.runner import Duration, timed

_PRODUCT_SIZE = 8192
_PRODUCTS_MAX = 1000
_WARM_UP = 8


class GpuDevice:
    """A device, such as "cuda:0" or "cpu", with a stream that stands for the engine's.

    Raises:
        ConfigError: there is no GPU that torch can use.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_gpu = self.device.type == "cuda"
        if self.is_gpu and not torch.cuda.is_available():
            raise ConfigError(
                f"torch {torch.__version__} finds no NVIDIA GPU here; run this where"
                " torch.cuda.is_available() is true."
            )
        self.stream = self.make_stream()
        self._beside = self.make_stream()
        self._product_s = 0.0
        self._matrix: torch.Tensor | None = None

    def make_stream(self) -> Any:
        """Return a new stream; None on the host."""
        return torch.cuda.Stream(self.device) if self.is_gpu else None

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which kernels go to `stream`."""
        return torch.cuda.stream(stream) if self.is_gpu else contextlib.nullcontext()

    def finish(self) -> None:
        """Wait, without sleeping, for all work of the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def time(self, work: Callable[[], Any]) -> Duration:
        """Time `work`, with the device idle before it; it returns when its work is done."""
        self.finish()
        return timed(work)

    @contextlib.contextmanager
    def multiplying(self, seconds: float) -> Iterator[None]:
        """Have the device multiply matrices beside the body, for `seconds` at least."""
        if self._matrix is None:
            size = _PRODUCT_SIZE if self.is_gpu else 8
            kind = torch.bfloat16 if self.is_gpu else torch.float32
            self._matrix = torch.randn(size, size, device=self.device, dtype=kind)
            self._multiply(_WARM_UP)
            self._product_s = self.time(self._multiply_and_wait).seconds / _WARM_UP
        self._multiply(min(_PRODUCTS_MAX, 1 + int(seconds / self._product_s)))
        try:
            yield
        finally:
            self.finish()

    def _multiply_and_wait(self) -> None:
        self._multiply(_WARM_UP)
        self.finish()

    def _multiply(self, count: int) -> None:
        assert self._matrix is not None
        with self.on(self._beside):
            for _ in range(count):
                torch.mm(self._matrix, self._matrix)

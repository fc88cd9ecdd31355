"""An NVIDIA GPU, through torch and, for copies by address, through its driver.

Of CUDA's driver it needs the few functions that torch does not have: copies by address, many in a
call. The library is there wherever torch has a GPU, and keeps the functions that it once had:
`cuMemcpyBatchAsync` has the signature of CUDA 12.8 also in later drivers. An error of the runtime's
library would show up in torch's next kernel. The package cuda-bindings makes a Python object of
each address; here arrays are handed over as they are. ctypes gives up the GIL meanwhile.

Source: cuda.h of CUDA 12.8 and 13.5.
"""

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvray.engine.device.pool import Pieces
from kvray.errors import TierError
from kvray.store.arena.tables import Array

if TYPE_CHECKING:
    from kvray.engine.device.gather import Below

_IN_STREAM_ORDER, _IN_ANY_ORDER = 1, 3
"""CUmemcpySrcAccessOrder: sources are read behind the stream's earlier work, or as soon as now."""
_USES_HOST_POINTERS = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM."""
_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL."""
_BESIDE_KERNELS = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""
_BATCH_MIN, _BATCH_MAX = 16, 128
"""Copies in a call. The device begins none before it has them all, and a copy takes the host 0.75
us: so the first calls are short, and each is made while the device is busy with the one before."""


class _Location(ctypes.Structure):
    """CUmemLocation; of no effect for memory that has a place."""

    _fields_ = [("type", c_int), ("id", c_int)]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("source_order", c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", c_uint),
    ]


class CudaDriver:
    """The driver, for one device; every method may be called from any thread."""

    def __init__(self, ordinal: int) -> None:
        """Use the device that torch calls `cuda:<ordinal>`; OSError: there is no driver."""
        self._cuda = _load()
        self.can_batch = hasattr(self._cuda, "cuMemcpyBatchAsync")
        """Whether the driver is of CUDA 12.8 or later."""
        self._context = c_void_p()  # the device's one context that torch uses, too
        device = c_int()
        error = self._cuda.cuDeviceGet(byref(device), ordinal)
        if not error:
            error = self._cuda.cuDevicePrimaryCtxRetain(byref(self._context), device)
        if error:
            raise OSError(error, self.name_of(error))
        answer = c_int()
        error = self._cuda.cuDeviceGetAttribute(byref(answer), _USES_HOST_POINTERS, device)
        self.sees_host_addresses = not error and answer.value == 1
        """Whether kernels may use the host's own addresses of registered memory."""

    def copy_batch(self, pieces: Pieces, stream: int, *, is_stable: bool) -> int:
        """Have `stream` make copies in any order; return 0, or the first error.

        Addresses on the host are of registered memory, and `stream` is not the default one.
        `is_stable` says that the sources do not change before the copies have ended.
        """
        attributes = _Attributes(
            source_order=_IN_ANY_ORDER if is_stable else _IN_STREAM_ORDER, flags=_BESIDE_KERNELS
        )
        first, failed = c_size_t(0), c_size_t(0)
        columns, total = [column.ctypes.data for column in pieces], len(pieces.sizes)
        error, start, count = self._enter(), 0, _BATCH_MIN
        while start < total and not error:
            error = int(
                self._cuda.cuMemcpyBatchAsync(
                    *(at + 8 * start for at in columns),
                    min(count, total - start),
                    byref(attributes),
                    byref(first),
                    1,
                    byref(failed),
                    stream,
                )
            )
            start, count = start + count, min(2 * count, _BATCH_MAX)
        return error

    def copy_each(self, pieces: Pieces, stream: int) -> int:
        """Have `stream` make copies one by one; return 0, or the first error."""
        error = self._enter()
        for target, source, size in zip(*(column.tolist() for column in pieces), strict=True):
            error = error or int(self._cuda.cuMemcpyAsync(target, source, size, stream))
        return error

    def name_of(self, error: int) -> str:
        """Return what the driver calls an error."""
        text = c_char_p()
        self._cuda.cuGetErrorString(error, byref(text))
        return text.value.decode() if text.value else f"CUDA error {error}"

    def _enter(self) -> int:
        """Make the device's context that of the calling thread, which may be new."""
        return int(self._cuda.cuCtxSetCurrent(self._context))


def _load() -> ctypes.CDLL:
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuDeviceGet.argtypes = (POINTER(c_int), c_int)
    cuda.cuDevicePrimaryCtxRetain.argtypes = (POINTER(c_void_p), c_int)
    cuda.cuDeviceGetAttribute.argtypes = (POINTER(c_int), c_int, c_int)
    cuda.cuCtxSetCurrent.argtypes = (c_void_p,)
    cuda.cuThreadExchangeStreamCaptureMode.argtypes = (POINTER(c_int),)
    cuda.cuGetErrorString.argtypes = (c_int, POINTER(c_char_p))
    cuda.cuMemcpyAsync.argtypes = (c_uint64, c_uint64, c_size_t, c_void_p)
    if hasattr(cuda, "cuMemcpyBatchAsync"):
        cuda.cuMemcpyBatchAsync.argtypes = (
            c_void_p,  # targets
            c_void_p,  # sources
            c_void_p,  # sizes
            c_size_t,  # how many
            POINTER(_Attributes),
            POINTER(c_size_t),  # the first copy that each attributes are for
            c_size_t,  # how many attributes
            POINTER(c_size_t),  # the copy that failed
            c_void_p,  # stream
        )
    return cuda


_log = logging.getLogger("kvray.connector")

KINDS = BATCHED, SINGLE, PAGEABLE, GATHERED = (
    "copied_bytes_batched",
    "copied_bytes_single",
    "copied_bytes_pageable",
    "copied_bytes_gathered",
)
"""Bytes by how they were copied: many copies in one call, one in a call, from or to memory that is
not registered, or by a kernel."""

_ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered: by another pool of this process, which will undo it."""


class CudaDevice:
    """The GPU of a pool's tensors. Until it is used, no call to CUDA is made.

    Calls are made inside `current`, from any thread. An engine may capture CUDA graphs meanwhile,
    in torch's mode, in which most calls of other threads end the capture: see `_beside_captures`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._opened: CudaDriver | None = None
        self._batches = True
        self._below: Below | None = None  # what a kernel copies; None: not known, or nothing
        self._is_calibrated = False
        self._others: set[int] = set()
        """Addresses of memory that somebody else has registered."""

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make it the calling thread's device."""
        with torch.cuda.device(self._device), _beside_captures():
            yield

    def make_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def record(self, stream: torch.cuda.Stream) -> "Event":
        """Return the point behind all work that `stream` has been given so far."""
        event = torch.cuda.Event(blocking=True)  # whoever waits sleeps, and does not spin
        with _mapped():
            event.record(stream)
        return Event(event)

    def wait(self, stream: torch.cuda.Stream, event: "Event") -> None:
        """Have what `stream` is given from now on run after `event`."""
        with _mapped():
            stream.wait_event(event.event)

    def copy(
        self, pieces: Pieces, stream: torch.cuda.Stream, *, is_load: bool, is_registered: bool
    ) -> str:
        """Give `stream` copies between the device and an arena; return how they are made.

        `is_load`: to the device, and the arena's bytes do not change. TierError: it refuses them.
        """
        if is_registered and self._is_for_kernel(pieces, is_load=is_load):
            try:
                self._copy_by_kernel(pieces, stream)
                return GATHERED
            except Exception as error:  # noqa: BLE001 - it needs memory of the device, engines none
                # What it has begun is done again: it is the same bytes.
                self._below = None
                _log.warning(
                    "kvray: %s copies small pieces without a kernel from now on: %s (said once)",
                    self._device,
                    error,
                )
        return self._copy_by_engines(pieces, stream, is_load=is_load, is_registered=is_registered)

    def _copy_by_engines(
        self, pieces: Pieces, stream: torch.cuda.Stream, *, is_load: bool, is_registered: bool
    ) -> str:
        driver, handle = self._driver(), stream.cuda_stream
        if is_registered and self._batches and len(pieces.sizes) > 1:
            error = driver.copy_batch(pieces, handle, is_stable=is_load)
            if not error:
                return BATCHED
            self._batches = False
            _log.warning(
                "kvray: %s refuses batches of copies (%s); they are made one by one, which is"
                " slower for small blocks (said once)",
                self._device,
                driver.name_of(error),
            )
        # What a batch has begun before it failed is done again: it is the same bytes.
        error = driver.copy_each(pieces, handle)
        if error:
            raise TierError(
                f"{self._device} refuses a copy from or to the arena ({driver.name_of(error)});"
                " restart the engine if it goes on."
            )
        return SINGLE if is_registered else PAGEABLE

    def calibrate(self) -> dict[str, int]:
        """Find out which pieces a kernel copies faster, once; return that, for people to see."""
        if not self._is_calibrated:
            self._is_calibrated = True
            try:
                self._below = self._measure()
            except Exception as error:  # noqa: BLE001 - no Triton, no memory, no compiler
                _log.info("kvray: %s copies small pieces without a kernel: %s", self._device, error)
        if self._below is None:
            return {}
        return {f"kernel_{kind}_max_bytes": size for kind, size in self._below._asdict().items()}

    def register(self, memory: Array) -> bool:
        """Make host memory fast to copy from and to; False if it cannot be, which is logged.

        CUDA's runtime keeps an error for the thread that met it, whose next kernel then fails, and
        torch has no call that takes it away. So a thread asks that does nothing else.
        """
        address = memory.ctypes.data
        try:
            with ThreadPoolExecutor(1, "kvray-register") as aside:
                error = aside.submit(self._register, address, memory.nbytes).result()
        except RuntimeError as failure:
            return self._say_pageable(str(failure))
        if error == _ALREADY_REGISTERED:
            self._others.add(address)
        elif error:
            return self._say_pageable(f"error {error}")
        return True

    def unregister(self, memory: Array) -> None:
        """Undo `register`; no copy of it may be under way."""
        address = memory.ctypes.data
        if address in self._others:
            self._others.discard(address)
        else:
            torch.cuda.cudart().cudaHostUnregister(address)

    def _register(self, address: int, num_bytes: int) -> int:
        with self.current():
            return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))

    def _is_for_kernel(self, pieces: Pieces, *, is_load: bool) -> bool:
        if self._below is None:
            return False
        from kvray.engine.device.gather import is_even

        most = self._below.load if is_load else self._below.save
        return pieces.num_bytes <= most * len(pieces.sizes) and is_even(pieces)

    def _copy_by_kernel(self, pieces: Pieces, stream: torch.cuda.Stream) -> None:
        from kvray.engine.device.gather import gather

        with _mapped(), torch.cuda.stream(stream):
            gather(pieces, self._device)

    def _measure(self) -> "Below | None":
        from kvray.engine.device.gather import MEMORY_BYTES, calibrate

        if not self._driver().sees_host_addresses:
            return None
        host = np.zeros(MEMORY_BYTES, dtype=np.uint8)
        if not self.register(host):
            return None
        stream = self.make_stream()
        try:
            scratch = torch.empty(len(host), dtype=torch.uint8, device=self._device)

            def by_engines(pieces: Pieces, is_load: bool) -> float:
                def copy() -> None:
                    self._copy_by_engines(pieces, stream, is_load=is_load, is_registered=True)

                return _time(stream, copy)

            def by_kernel(pieces: Pieces, _: bool) -> float:
                return _time(stream, lambda: self._copy_by_kernel(pieces, stream))

            found = calibrate(host.ctypes.data, scratch.data_ptr(), by_engines, by_kernel)
        finally:
            stream.synchronize()  # of the whole device it would end a capture
            self.unregister(host)
        _log.info(
            "kvray: %s copies pieces of up to %d bytes to it, and of up to %d from it, by a kernel",
            self._device,
            *found,
        )
        return found

    def _driver(self) -> CudaDriver:
        """Return the driver, loaded at the first copy; TierError: it cannot be."""
        if self._opened is None:
            try:
                self._opened = CudaDriver(self._device.index)
            except OSError as error:
                raise TierError(f"The CUDA driver cannot be used ({error.strerror}).") from None
            self._batches = self._opened.can_batch
        return self._opened

    def _say_pageable(self, why: str) -> bool:
        _log.warning(
            "kvray: %s refuses to register host memory (%s): copies are slow and hold the engine"
            " up; raise the limit of locked memory (`ulimit -l unlimited`, in a container `--ulimit"
            " memlock=-1`), or make arena.capacity or connector.hold smaller, and restart the"
            " engine",
            self._device,
            why,
        )
        return False


def _time(stream: torch.cuda.Stream, work: Callable[[], None]) -> float:
    """Return the seconds that `stream` takes for what `work` gives it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return 1e-3 * float(begin.elapsed_time(end))


class Event:
    """A point in a stream's work."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def query(self) -> bool:
        """Return whether the work before it has ended."""
        with _mapped():
            return bool(self.event.query())

    def synchronize(self) -> None:
        """Block the calling thread, without the GIL, until it has passed; TierError: no answer."""
        with _mapped():
            self.event.synchronize()


_library = functools.cache(_load)


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    """Have this thread's calls disturb no capture of another thread's.

    Source: `cuThreadExchangeStreamCaptureMode`; the mode is the thread's, and is put back.
    """
    mode = c_int(_THREAD_LOCAL)
    _library().cuThreadExchangeStreamCaptureMode(byref(mode))
    try:
        yield
    finally:
        _library().cuThreadExchangeStreamCaptureMode(byref(mode))


@contextlib.contextmanager
def _mapped() -> Iterator[None]:
    try:
        with _beside_captures():
            yield
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise TierError(f"The GPU failed ({cause}); restart the engine.") from error

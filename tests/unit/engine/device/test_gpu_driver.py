"""How the driver is called, by a stand-in with the signatures of cuda.h that copies in memory."""

import contextlib
import ctypes
import logging
import threading
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from kvray.engine.device import cuda_device
from kvray.engine.device.cuda_device import (
    BATCHED,
    GATHERED,
    PAGEABLE,
    SINGLE,
    CudaDevice,
    CudaDriver,
)
from kvray.engine.device.gather import Below
from kvray.engine.device.pool import Pieces
from kvray.errors import TierError

STREAM = 0x5EED_0000_0001
CONTEXT = 0xC0DE_0000_0002
INVALID_VALUE = 1
Copies = tuple[np.ndarray, np.ndarray, Pieces]


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h, its nested structures written out."""

    _fields_ = [
        ("srcAccessOrder", c_int),
        *((f"{one}LocHint_{what}", c_int) for one in ("src", "dst") for what in ("type", "id")),
        ("flags", c_uint),
    ]


class Driver:
    """libcuda: C functions, each of the signature in cuda.h of CUDA 12.8."""

    def __init__(self) -> None:
        self.batch_error = self.single_error = 0
        self.calls: list[tuple[Any, ...]] = []
        self.has_batches = self.sees_host_addresses = True
        self.capture_mode = 0  # of the only thread

    def library(self) -> SimpleNamespace:
        addresses, sizes = POINTER(c_uint64), POINTER(c_size_t)
        batch = (addresses, addresses, sizes, c_size_t, POINTER(Attributes), sizes, c_size_t, sizes)
        functions: dict[str, tuple[Any, ...]] = {
            "cuDeviceGet": (self._device_get, POINTER(c_int), c_int),
            "cuDevicePrimaryCtxRetain": (self._retain, POINTER(c_void_p), c_int),
            "cuDeviceGetAttribute": (self._attribute, POINTER(c_int), c_int, c_int),
            "cuCtxSetCurrent": (self._set_current, c_void_p),
            "cuThreadExchangeStreamCaptureMode": (self._exchange, POINTER(c_int)),
            "cuGetErrorString": (self._error_string, c_int, POINTER(c_char_p)),
            "cuMemcpyAsync": (self._copy, c_uint64, c_uint64, c_size_t, c_void_p),
            "cuMemcpyBatchAsync": (self._copy_batch, *batch, c_void_p),
        }
        if not self.has_batches:
            del functions["cuMemcpyBatchAsync"]
        return SimpleNamespace(
            **{name: ctypes.CFUNCTYPE(c_int, *of)(call) for name, (call, *of) in functions.items()}
        )

    def _device_get(self, device: Any, ordinal: int) -> int:
        device[0] = 10 + ordinal
        return 0

    def _retain(self, context: Any, device: int) -> int:
        self.calls.append(("retain", device))
        context[0] = CONTEXT
        return 0

    def _attribute(self, answer: Any, attribute: int, device: int) -> int:
        assert (attribute, device // 10) == (91, 1)
        answer[0] = self.sees_host_addresses
        return 0

    def _exchange(self, mode: Any) -> int:
        self.capture_mode, mode[0] = mode[0], self.capture_mode
        return 0

    def _set_current(self, context: int) -> int:
        self.calls.append(("current", context))
        return 0

    def _error_string(self, error: int, text: Any) -> int:
        text[0] = b"invalid argument" if error == INVALID_VALUE else None
        return 0

    def _copy(self, target: int, source: int, size: int, stream: int) -> int:
        self.calls.append(("copy", stream))
        if not self.single_error:
            ctypes.memmove(target, source, size)
        return self.single_error

    def _copy_batch(self, *given: Any) -> int:
        targets, sources, sizes, count, attributes, firsts, num_attributes, _, stream = given
        order, flags = attributes[0].srcAccessOrder, attributes[0].flags
        self.calls.append(("batch", count, order, flags, firsts[0], num_attributes, stream))
        if not self.batch_error:
            for at in range(count):
                ctypes.memmove(targets[at], sources[at], sizes[at])
        return self.batch_error


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    installed = {"libcuda.so.1": made.library}
    monkeypatch.setattr(cuda_device.ctypes, "CDLL", lambda name: installed[name]())
    monkeypatch.setattr(cuda_device, "_library", made.library)
    return made


@pytest.fixture
def copies() -> Copies:
    """Return (target, source, copies of its even halves to the target's end, turned around)."""
    source = np.arange(64, dtype=np.uint8)
    target = np.zeros(64, dtype=np.uint8)
    starts, sizes = np.array([0, 32], dtype=np.uint64), np.array([8, 16], dtype=np.uint64)
    base, into = np.uint64(source.ctypes.data), np.uint64(target.ctypes.data)
    return target, source, Pieces(into + starts[::-1], base + starts, sizes)


def is_copied(target: np.ndarray, source: np.ndarray) -> bool:
    return bool((target[32:40] == source[:8]).all() and (target[:16] == source[32:48]).all())


def test_a_batch_is_one_call_with_one_set_of_attributes(driver, copies):
    assert ctypes.sizeof(cuda_device._Attributes) == ctypes.sizeof(Attributes) == 24
    assert cuda_device._Attributes.flags.offset == 20
    target, source, pieces = copies
    opened = CudaDriver(3)
    assert opened.can_batch
    assert opened.copy_batch(pieces, STREAM, is_stable=True) == 0
    assert is_copied(target, source)
    assert opened.copy_batch(pieces, STREAM, is_stable=False) == 0
    assert driver.calls == [
        ("retain", 13),
        ("current", CONTEXT),
        ("batch", 2, 3, 1, 0, 1, STREAM),
        ("current", CONTEXT),
        ("batch", 2, 1, 1, 0, 1, STREAM),
    ]


def test_a_long_batch_is_told_in_growing_calls_so_that_the_device_begins_early(driver):
    source, target = np.arange(300, dtype=np.uint64), np.zeros(300, dtype=np.uint64)
    at = np.arange(300, dtype=np.uint64) * np.uint64(8)
    sizes = np.full(300, 8, dtype=np.uint64)
    ends = (np.uint64(one.ctypes.data) + at for one in (target, source))
    assert CudaDriver(0).copy_batch(Pieces(*ends, sizes), STREAM, is_stable=True) == 0
    assert (target == source).all()
    assert [call[1] for call in driver.calls if call[0] == "batch"] == [16, 32, 64, 128, 60]


# -- the device over it -------------------------------------------------------------------------


def copy(device: CudaDevice, pieces: Pieces, *, is_registered: bool = True) -> str:
    stream: Any = SimpleNamespace(cuda_stream=STREAM)
    return device.copy(pieces, stream, is_load=True, is_registered=is_registered)


def cuda() -> CudaDevice:
    return CudaDevice(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("has_batches", "is_registered", "expected"),
    [(True, True, BATCHED), (True, False, PAGEABLE), (False, True, SINGLE)],
    ids=["batched", "not registered", "before CUDA 12.8"],
)
def test_copies_take_the_best_way_there_is(driver, copies, has_batches, is_registered, expected):
    target, source, pieces = copies
    driver.has_batches = has_batches
    assert copy(cuda(), pieces, is_registered=is_registered) == expected
    assert is_copied(target, source)
    assert copy(cuda(), Pieces(*(column[:1] for column in pieces))) == SINGLE, "a run is no batch"


def test_refused_batches_are_made_one_by_one_from_then_on_and_said_once(driver, copies, caplog):
    target, source, pieces = copies
    driver.batch_error, device = INVALID_VALUE, cuda()
    with caplog.at_level(logging.WARNING, "kvray.connector"):
        assert [copy(device, pieces) for _ in range(3)] == [SINGLE] * 3
    assert is_copied(target, source)
    assert [call[0] for call in driver.calls].count("batch") == 1
    assert len(caplog.records) == 1
    assert "invalid argument" in caplog.text


@pytest.mark.parametrize(
    ("error", "cause"), [(INVALID_VALUE, "invalid argument"), (999, "CUDA error 999")]
)
def test_a_copy_that_cannot_be_made_is_an_error_with_its_cause(driver, copies, error, cause):
    driver.batch_error = driver.single_error = error
    with pytest.raises(TierError, match=rf"cuda:0 refuses a copy.*{cause}"):
        copy(cuda(), copies[2])


def test_a_missing_driver_is_an_error_that_names_it(monkeypatch, copies):
    monkeypatch.setattr(cuda_device.ctypes, "CDLL", Mock(side_effect=OSError(2, "no such file")))
    with pytest.raises(TierError, match="CUDA driver"):
        copy(cuda(), copies[2])


def test_a_thread_disturbs_no_capture_and_has_its_own_mode_again_afterwards(driver):
    def fail() -> None:
        assert driver.capture_mode == 1
        raise RuntimeError("a device that failed")

    with pytest.raises(TierError), cuda_device._mapped():
        fail()
    assert driver.capture_mode == 0
    driver.capture_mode = 2
    with cuda_device._beside_captures():
        assert driver.capture_mode == 1
    assert driver.capture_mode == 2


def test_refused_memory_leaves_the_engine_s_thread_no_error(driver, monkeypatch, caplog):
    """The runtime keeps it for the thread that asked, and that one's next kernel fails by it."""
    errors = threading.local()

    def refuse(*_: int) -> int:
        errors.last = 2
        return 2

    monkeypatch.setattr("torch.cuda.cudart", lambda: SimpleNamespace(cudaHostRegister=refuse))
    monkeypatch.setattr("torch.cuda.device", lambda _: contextlib.nullcontext())
    assert not cuda().register(np.zeros(64, dtype=np.uint8))
    assert not hasattr(errors, "last")
    assert "cuda:0 refuses to register host memory (error 2)" in caplog.text


# -- the kernel for small pieces ------------------------------------------------------------------


def gathering(*, load: int, save: int, by_kernel: Mock) -> Any:
    """Return a device for which a kernel was found to be faster."""
    device: Any = cuda()
    device._measure, device._copy_by_kernel = lambda: Below(load, save), by_kernel
    assert device.calibrate() == {"kernel_load_max_bytes": load, "kernel_save_max_bytes": save}
    return device


@pytest.mark.parametrize(
    ("load", "save", "lacking", "is_registered", "expected"),
    [
        (12, 0, 0, True, GATHERED),
        (11, 0, 0, True, BATCHED),
        (12, 0, 0, False, PAGEABLE),
        (0, 1024, 0, True, BATCHED),
        (1024, 0, 1, True, BATCHED),
    ],
    ids=["small", "larger", "not registered", "a limit of saves", "no whole words"],
)
def test_small_pieces_go_by_kernel(driver, copies, load, save, lacking, is_registered, expected):
    pieces = copies[2]._replace(sizes=copies[2].sizes - np.uint64(lacking))
    device = gathering(load=load, save=save, by_kernel=Mock())
    assert copy(device, pieces, is_registered=is_registered) == expected


def test_a_kernel_that_cannot_be_had_is_not_asked_for_again(driver, copies, monkeypatch):
    device, measure = cuda(), Mock(side_effect=ModuleNotFoundError("No module named 'triton'"))
    monkeypatch.setattr(device, "_measure", measure)
    assert device.calibrate() == device.calibrate() == {}
    assert measure.call_count == 1
    assert copy(device, copies[2]) == BATCHED


def test_copies_that_the_kernel_cannot_make_are_made_by_engines(driver, copies, caplog):
    target, source, pieces = copies
    by_kernel = Mock(side_effect=torch.OutOfMemoryError("no memory for the addresses"))
    device = gathering(load=1024, save=0, by_kernel=by_kernel)
    assert [copy(device, pieces) for _ in range(2)] == [BATCHED] * 2
    assert by_kernel.call_count == 1
    assert is_copied(target, source)
    assert [one.levelname for one in caplog.records] == ["WARNING"]


def test_a_card_whose_kernels_have_other_addresses_has_no_kernel(driver, copies):
    driver.sees_host_addresses = False
    assert cuda().calibrate() == {}

"""The few functions of CUDA's driver that torch does not have: copies by address, many in a call.

The driver's library is there wherever torch has a GPU, and keeps the functions that it once had:
`cuMemcpyBatchAsync` has the signature of CUDA 12.8 also in later drivers. An error of the runtime's
library would show up in torch's next kernel. The package cuda-bindings makes a Python object of
each address; here arrays are handed over as they are. ctypes gives up the GIL meanwhile.

Source: cuda.h of CUDA 12.8 and 13.5.
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

from kvray.engine.device.pieces import Pieces

_SUCCESS = 0
_IN_STREAM_ORDER, _IN_ANY_ORDER = 1, 3
"""CUmemcpySrcAccessOrder: sources are read behind the stream's earlier work, or as soon as now."""
_BESIDE_KERNELS = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""


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

    def copy_batch(self, pieces: Pieces, stream: int, *, is_stable: bool) -> int:
        """Have `stream` make copies in any order; return 0, or the error.

        Addresses on the host are of registered memory, and `stream` is not the default one.
        `is_stable` says that the sources do not change before the copies have ended.
        """
        attributes = _Attributes(
            source_order=_IN_ANY_ORDER if is_stable else _IN_STREAM_ORDER, flags=_BESIDE_KERNELS
        )
        first, failed = c_size_t(0), c_size_t(0)
        return self._enter() or int(
            self._cuda.cuMemcpyBatchAsync(
                *(column.ctypes.data for column in pieces),
                len(pieces.sizes),
                byref(attributes),
                byref(first),
                1,
                byref(failed),
                stream,
            )
        )

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
    cuda.cuCtxSetCurrent.argtypes = (c_void_p,)
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

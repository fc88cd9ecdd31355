"""Tables that tell of every store into them, element by element.

numpy stores the elements of one assignment in order, and a process can die between any two.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvray.store.arena.layout import Geometry
from kvray.store.arena.tables import Array, Counts, Tables, UndoRecord

Write = tuple[int, bytes]
"""(byte of the buffer, what was stored there)."""

Watch = Callable[[list[Write]], None]
"""Called after each assignment with the stores it was made of, in their order."""


class WatchedTables(Tables):
    """Tables that tell `watch` of every store made through them."""

    def __init__(self, buffer: Any, geometry: Geometry, watch: Watch) -> None:
        super().__init__(buffer, geometry)
        whole = np.frombuffer(buffer, dtype=np.uint8)
        recorder = _Recorder(whole, watch)
        for name, _, _ in geometry.tables():
            view = getattr(self, name).view(_Watched)
            view.recorder = recorder
            setattr(self, name, view)
        self.counts = _WatchedCounts(self.counts, recorder)
        self.columns = {name: getattr(self, name).reshape(-1) for name in self.columns}
        self.undo = UndoRecord(self.columns, self.counts, self.undo_entry, self.undo_log)


class _Recorder:
    def __init__(self, whole: Array, watch: Watch) -> None:
        self._start = whole.__array_interface__["data"][0]
        self._watch = watch

    def stored(self, array: Array, key: Any) -> None:
        plain = array.view(np.ndarray)
        at = plain.__array_interface__["data"][0] - self._start
        assert plain.flags.c_contiguous
        where = np.arange(plain.size).reshape(plain.shape)[key].ravel()
        elements = plain.reshape(-1)[where]
        size = plain.itemsize
        self._watch(
            [
                (at + int(one) * size, value.tobytes())
                for one, value in zip(where, elements, strict=True)
            ]
        )


class _Watched(np.ndarray):
    """A view that reads like the table it shows."""

    recorder: _Recorder

    def __array_finalize__(self, source: Any) -> None:
        self.recorder = getattr(source, "recorder", None)  # type: ignore[assignment]

    def __getitem__(self, key: Any) -> Any:
        return self.view(np.ndarray)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.view(np.ndarray)[key] = value
        self.recorder.stored(self, key)

    def take(self, indices: Any, axis: Any = None, out: Any = None, mode: Any = "raise") -> Any:
        answer = self.view(np.ndarray).take(indices, axis, out, mode)
        if out is not None:  # a part of the undo log
            self.recorder.stored(out, ...)
        return answer

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [one.view(np.ndarray) if isinstance(one, _Watched) else one for one in inputs]
        out = kwargs.pop("out", None)
        if out is not None:
            getattr(ufunc, method)(*plain, out=(self.view(np.ndarray),), **kwargs)
            self.recorder.stored(self, ...)
            return self
        answer = getattr(ufunc, method)(*plain, **kwargs)
        if method == "at":
            self.recorder.stored(self, inputs[1])
        return answer

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        def plain(one: Any) -> Any:
            if isinstance(one, _Watched):
                return one.view(np.ndarray)
            return type(one)(map(plain, one)) if isinstance(one, tuple | list) else one

        return func(*plain(args), **{name: plain(value) for name, value in kwargs.items()})


class _WatchedCounts:
    """The counts of the header."""

    def __init__(self, counts: Counts, recorder: _Recorder) -> None:
        words: Any = np.frombuffer(counts, dtype="<u8")  # type: ignore[call-overload]
        vars(self).update(counts=counts, recorder=recorder, words=words)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["counts"], name)

    def __setattr__(self, name: str, value: int) -> None:
        setattr(self.counts, name, value)
        at = getattr(Counts, name).offset // 8
        self.recorder.stored(self.words, slice(at, at + 1))


def copy_of(tables: Tables) -> Tables:
    """Return equal tables in memory of their own."""
    return Tables(bytearray(image(tables)), tables.geometry)


def image(tables: Tables) -> bytes:
    """Return the bytes of a whole arena."""
    return bytes(tables.data.base)  # type: ignore[arg-type]


def record(tables: Tables, operation: Callable[[Tables], object]) -> list[Write]:
    """Do `operation` on a copy of `tables`; return the stores it made, in their order."""
    log: list[Write] = []
    operation(WatchedTables(bytearray(image(tables)), tables.geometry, log.extend))
    return log


class Replay:
    """Makes the stores of a log one after the other, and shows the tables after each."""

    def __init__(self, tables: Tables, log: list[Write]) -> None:
        self._geometry = tables.geometry
        self._bytes = bytearray(image(tables))
        self._log = log
        self._done = 0

    def after(self, count: int) -> Tables:
        """Return a copy of the tables after `count` stores; `count` never goes back."""
        assert count >= self._done
        for at, value in self._log[self._done : count]:
            self._bytes[at : at + len(value)] = value
        self._done = count
        return Tables(bytearray(self._bytes), self._geometry)

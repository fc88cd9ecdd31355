"""Tables that write down every element they are changed in, to replay a death after any of them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvray.store.tables import Array, Tables

Write = tuple[str, Any, Any]
"""(table, or field of the header; where, flat; the new value)."""

HEADER = "header."


class Logged(np.ndarray):
    """A view that reads like the table it shows and notes each store into it, element by element.

    numpy stores the elements of one assignment in order, and a process can die between any two.
    """

    name: str
    log: list[Write]

    def __getitem__(self, key: Any) -> Any:
        return self.view(np.ndarray)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        plain = self.view(np.ndarray)
        plain[key] = value
        if isinstance(key, str):
            self.log.append((HEADER + key, None, plain[key][()]))
        else:
            self._note(key)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [one.view(np.ndarray) if isinstance(one, Logged) else one for one in inputs]
        out = kwargs.pop("out", None)
        if out is not None:
            getattr(ufunc, method)(*plain, out=(self.view(np.ndarray),), **kwargs)
            self._note(...)
            return self
        answer = getattr(ufunc, method)(*plain, **kwargs)
        if method == "at":
            self._note(inputs[1])
        return answer

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        def plain(one: Any) -> Any:
            if isinstance(one, Logged):
                return one.view(np.ndarray)
            return type(one)(map(plain, one)) if isinstance(one, tuple | list) else one

        return func(*plain(args), **{name: plain(value) for name, value in kwargs.items()})

    def _note(self, key: Any) -> None:
        plain = self.view(np.ndarray)
        where = np.arange(plain.size).reshape(plain.shape)[key].ravel()
        self.log += [(self.name, at, plain.flat[at]) for at in where.tolist()]


def copy_of(tables: Tables) -> Tables:
    """Return equal tables in memory of their own."""
    copy = Tables(np.zeros(tables.geometry.file_bytes, dtype=np.uint8), tables.geometry)
    copy.header[...] = tables.header
    for name, _, _ in tables.geometry.tables():
        getattr(copy, name)[...] = getattr(tables, name)
    return copy


def record(tables: Tables, operation: Callable[[Tables], object]) -> list[Write]:
    """Do `operation` on a copy of `tables`; return the stores it made, in their order."""
    copy, log = copy_of(tables), list[Write]()
    for name in ("header", *(name for name, _, _ in tables.geometry.tables())):
        view = getattr(copy, name).view(Logged)
        view.name, view.log = name, log
        setattr(copy, name, view)
    operation(copy)
    return log


def replay(tables: Tables, log: list[Write]) -> Tables:
    """Return a copy of `tables` with the stores of `log` made."""
    copy = copy_of(tables)
    for name, where, value in log:
        if name.startswith(HEADER):
            copy.header[name.removeprefix(HEADER)] = value
        else:
            table: Array = getattr(copy, name)
            table.flat[where] = value
    return copy

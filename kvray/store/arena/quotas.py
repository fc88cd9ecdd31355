"""Quotas: the bytes that one namespace's blocks may take of an arena, and those that they take.

The owner writes the quotas into the arena, where every writer that evicts finds them. Blocks of an
unknown namespace have none. Pure; only setting them needs the lock.
"""

from collections.abc import Mapping

import numpy as np

from kvray.errors import ConfigError
from kvray.store.arena.layout import QUOTAS_MAX, READY
from kvray.store.arena.tables import Tables

_ID_DIGITS = 8
_FEW = 8
"""Namespaces that are summed up one by one, which is faster; an arena hardly ever has more."""


def name_of(namespace: int) -> str:
    """Return a namespace as people see it: the first 8 hex digits of its digest."""
    return namespace.to_bytes(4, "little").hex()


def set_quotas(tables: Tables, quotas: Mapping[str, int]) -> None:
    """Have these quotas, in bytes, and no others; ConfigError if they cannot be kept.

    Names are the hex digits that a namespace's digest begins with. The longest that fits counts,
    and "" fits all.
    """
    if len(quotas) > QUOTAS_MAX:
        raise ConfigError(f"There are {len(quotas)} quotas; an arena has at most {QUOTAS_MAX}.")
    prefixes = sorted({name[:_ID_DIGITS].lower() for name in quotas}, key=len, reverse=True)
    asked = {name[:_ID_DIGITS].lower(): size for name, size in quotas.items()}
    rows = [(_number(one, "0"), _number("f" * len(one), "0"), asked[one]) for one in prefixes]
    rows += [(0, 0, 0)] * (QUOTAS_MAX - len(rows))
    tables.quota_bytes[:] = 0
    tables.quota_namespace[:], tables.quota_mask[:], sizes = (
        np.array(column, dtype="<u8") for column in zip(*rows, strict=True)
    )
    tables.quota_bytes[:] = sizes


def quota_of(tables: Tables, namespace: int) -> int | None:
    """Return the bytes that a namespace's blocks may take; None: there is no bound."""
    if not namespace:
        return None
    fits = (tables.quota_namespace ^ np.uint32(namespace)) & tables.quota_mask == 0
    rows = np.flatnonzero(fits & (tables.quota_bytes > 0))
    return int(tables.quota_bytes[rows[0]]) if len(rows) else None


def used(tables: Tables) -> dict[int, tuple[int, int]]:
    """Return (blocks, bytes) of every namespace that has READY blocks."""
    sizes, namespaces = tables.slab_block_bytes, tables.slot_namespace[tables.backed]
    left = tables.slot_state[tables.backed] == READY
    found: dict[int, tuple[int, int]] = {}
    for _ in range(_FEW):
        first = int(left.argmax())
        if not left[first]:
            return found
        namespace = int(namespaces[first])
        mine = left & (namespaces == namespace)
        left &= ~mine
        counts = np.count_nonzero(tables.geometry.by_slab(mine), axis=(1, 2))
        found[namespace] = int(counts.sum()), int(counts @ sizes)
    slots = np.flatnonzero(left)
    names, which = np.unique(tables.slot_namespace[slots], return_inverse=True)
    counts = np.bincount(which, minlength=len(names))
    sums = np.bincount(which, tables.block_bytes(slots), minlength=len(names))
    pairs = zip(counts.tolist(), sums.astype(np.int64).tolist(), strict=True)
    return found | dict(zip(names.tolist(), pairs, strict=True))


def excess(tables: Tables, share: float = 1.0) -> dict[int, int]:
    """Return, for namespaces over a share of their quotas, by how many bytes they are."""
    if not tables.quota_bytes.any():
        return {}
    over = {}
    for namespace, (_, num_bytes) in used(tables).items():
        quota = quota_of(tables, namespace)
        if quota is not None and (beyond := num_bytes - int(share * quota)) > 0:
            over[namespace] = beyond
    return over


def _number(digits: str, fill: str) -> int:
    """Return hex digits, filled up, as the number of a namespace in an arena."""
    try:
        return int.from_bytes(bytes.fromhex(digits.ljust(_ID_DIGITS, fill)), "little")
    except ValueError:
        raise ConfigError(
            f"{digits!r} is no start of a namespace's digest; give hex digits as `kvray status`"
            " shows them."
        ) from None

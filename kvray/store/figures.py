"""An arena's figures for people."""

from typing import Any

from kvray.store import quotas
from kvray.store.fragmentation import slab_use, spare_slabs
from kvray.store.layout import QUARANTINED, READY
from kvray.store.tables import Tables

_NAMESPACES_MAX = 256
_COUNTED = ("stored", "evicted", "dropped", "corrupt", "repairs", "over_quota")


def figures(tables: Tables) -> dict[str, Any]:
    """Return the figures; read without the lock, so they may be a moment apart."""
    geometry, header = tables.geometry, tables.header
    ready = tables.slot_state == READY
    per_slab = ready.reshape(geometry.num_slabs, -1).sum(axis=1)
    return {
        "shard_epoch": int(header["shard_epoch"]),
        "capacity_bytes": geometry.capacity,
        "resident_bytes": int((per_slab * tables.slab_block_bytes).sum()),
        "blocks": int(ready.sum()),
        "leased_blocks": int((tables.slot_leases > 0).sum()),
        "quarantined_blocks": int((tables.slot_state == QUARANTINED).sum()),
        "holders": int(tables.holder_live.sum()),
        "slabs": slab_use(tables),
        "spare_slabs": spare_slabs(tables),
        "namespaces": by_namespace(tables),
        **{name: int(header[name]) for name in _COUNTED},
    }


def by_namespace(tables: Tables) -> list[dict[str, Any]]:
    """Return what the largest namespaces have, in order; "" is where the name is not known.

    Read without the lock, as all of it.
    """
    found = sorted(quotas.used(tables).items(), key=lambda one: -one[1][1])
    return [
        {
            "namespace": quotas.name_of(namespace) if namespace else "",
            "blocks": num_blocks,
            "bytes": num_bytes,
            "quota_bytes": quotas.quota_of(tables, namespace),
        }
        for namespace, (num_blocks, num_bytes) in found[:_NAMESPACES_MAX]
    ]

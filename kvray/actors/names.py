"""Names of the tier's actors, and the Ray namespace that has them; imports no Ray."""

NAMESPACE_PREFIX = "kvray-"
LOOKUP_NAME = "kvray-lookup"
SUPERVISOR_NAME = "kvray-supervisor"
SHARD_PREFIX = "kvray-shard-"
MOVER_PREFIX = "kvray-mover-"


def namespace_of(cluster_name: str) -> str:
    """Return the Ray namespace of a tier: tiers of different names share a Ray cluster."""
    return NAMESPACE_PREFIX + cluster_name


def shard_name(node_id: str) -> str:
    """Return the actor name of the shard on a Ray node."""
    return SHARD_PREFIX + node_id[:12]


def mover_name(node_id: str) -> str:
    """Return the actor name of the mover on a Ray node."""
    return MOVER_PREFIX + node_id[:12]

"""Names of the tier's actors, and the Ray namespace that has them; imports no Ray."""

NAMESPACE_PREFIX = "kvray-"
LOOKUP_NAME = "kvray-lookup"
SUPERVISOR_NAME = "kvray-supervisor"
SHARD_PREFIX = "kvray-shard-"
MOVER_PREFIX = "kvray-mover-"


def namespace_of(cluster_name: str) -> str:
    """Return the Ray namespace of a tier: tiers of different names share a Ray cluster."""
    return NAMESPACE_PREFIX + cluster_name


def routes_namespace(cluster_name: str) -> str:
    """Return the Ray namespace of what routers share, which is no part of the tier."""
    return f"{namespace_of(cluster_name)}-routes"


def lookup_name(partition: int) -> str:
    """Return the actor name of a partition of the lookup; the first has that of the lookup."""
    return f"{LOOKUP_NAME}-{partition}" if partition else LOOKUP_NAME


def lookup_names(num_partitions: int) -> list[str]:
    """Return the actor names of all partitions of the lookup."""
    return [lookup_name(partition) for partition in range(num_partitions)]


def is_lookup(name: str) -> bool:
    """Return whether a part of that name is a partition of the lookup."""
    return name == LOOKUP_NAME or name.startswith(f"{LOOKUP_NAME}-")


def shard_name(node_id: str) -> str:
    """Return the actor name of the shard on a Ray node."""
    return SHARD_PREFIX + node_id[:12]


def mover_name(node_id: str) -> str:
    """Return the actor name of the mover on a Ray node."""
    return MOVER_PREFIX + node_id[:12]


def node_of(actor: str) -> str:
    """Return the name of the node that a shard or a mover is on."""
    return actor.removeprefix(SHARD_PREFIX).removeprefix(MOVER_PREFIX)

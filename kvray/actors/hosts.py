"""What people call the nodes of a tier: by their hosts; pure.

`Hosts` are node -> name and ip of its host, with a node's id as its actors' names have it.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvray.actors.names import MOVER_PREFIX, SHARD_PREFIX, node_of
from kvray.errors import ConfigError

Hosts = Mapping[str, Mapping[str, str]]


def labels(hosts: Hosts, *, with_ids: bool = False) -> dict[str, str]:
    """Return what each node is called: "gpu-7 (10.0.0.7)", with its id if a host has several."""
    count = Counter(host["name"] for host in hosts.values())
    made = {}
    for node, host in hosts.items():
        has_id = with_ids or count[host["name"]] > 1
        made[node] = (
            f"{host['name']} ({', '.join(filter(None, (host['ip'], node if has_id else '')))})"
        )
    return made


def node_meant(text: str, hosts: Hosts) -> str:
    """Return the one node whose host name, IP or id, or its beginning, is `text`; or its shard's.

    ConfigError: there is none, or there are several.
    """
    meant = node_of(text)
    found = [
        node
        for node, host in hosts.items()
        if meant
        and (
            meant in (host["name"], host["name"].partition(".")[0], host["ip"])
            or node.startswith(meant)
            or meant.startswith(node)
        )
    ]
    if len(found) != 1:
        known = labels({node: hosts[node] for node in found or sorted(hosts)}, with_ids=True)
        fault = "several nodes are" if found else "no node is"
        raise ConfigError(
            f"{text!r:.80}: {fault} named so; the nodes with shards are"
            f" {', '.join(known.values()) or 'none'}."
        )
    return found[0]


def named(found: Any, hosts: Hosts, *, with_ids: bool = False) -> Any:
    """Return an answer with the labels of nodes in place of their ids and their actors' names."""
    if not (names := labels(hosts, with_ids=with_ids)):
        return found
    ids = re.compile(rf"(?:{SHARD_PREFIX}|{MOVER_PREFIX})?\b({'|'.join(map(re.escape, names))})\b")

    def told(part: Any) -> Any:
        if isinstance(part, str):
            return ids.sub(lambda one: names[one[1]], part)
        if isinstance(part, Mapping):
            return {
                told(key): value if key == "hosts" else told(value) for key, value in part.items()
            }
        return [told(one) for one in part] if isinstance(part, list | tuple) else part

    return told(found)

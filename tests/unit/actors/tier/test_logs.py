"""Which nodes are asked for the lines of which parts."""

from typing import Any

import pytest

from kvray.actors.tier.logs import homes
from kvray.errors import ConfigError

HEAD, ONE, TWO = (digit * 56 for digit in "abc")
PARTS = [
    *("kvray-lookup", "kvray-lookup-1", "kvray-supervisor"),
    *(f"kvray-{kind}-{node[:12]}" for kind in ("mover", "shard") for node in (ONE, TWO)),
]


def node(node_id: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": node_id, "Alive": alive, "Resources": resources}


NODES = [node(HEAD, **{"node:__internal_head__": 1.0}), node(ONE), node(TWO), node("d" * 56)]
GONE = [*NODES[:2], node(TWO, alive=False)]


def test_each_node_is_asked_for_its_parts_and_one_without_any_is_not() -> None:
    found = homes(NODES, PARTS, None)
    assert found.keys() == {HEAD, ONE, TWO}
    assert found[HEAD] == {"kvray-lookup", "kvray-lookup-1", "kvray-supervisor"}
    assert found[ONE] == {f"kvray-shard-{ONE[:12]}", f"kvray-mover-{ONE[:12]}"}


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        ("shard", {f"kvray-shard-{ONE[:12]}", f"kvray-shard-{TWO[:12]}"}),
        ("lookup", {"kvray-lookup", "kvray-lookup-1"}),
        ("lookup-1", {"kvray-lookup-1"}),
        ("supervisor", {"kvray-supervisor"}),
        (f"mover-{ONE[:12]}", {f"kvray-mover-{ONE[:12]}"}),
        (f"kvray-mover-{TWO[:12]}", {f"kvray-mover-{TWO[:12]}"}),
        (ONE[:12], {f"kvray-shard-{ONE[:12]}", f"kvray-mover-{ONE[:12]}"}),
        (HEAD, {"kvray-lookup", "kvray-lookup-1", "kvray-supervisor"}),
    ],
)
def test_a_kind_a_part_or_a_node_is_named(part: str, wanted: set[str]) -> None:
    assert set().union(*homes(NODES, PARTS, part).values()) == wanted


def test_a_lookup_and_a_supervisor_that_are_gone_are_asked_for_all_the_same() -> None:
    assert homes(NODES, PARTS[3:], "supervisor") == {HEAD: {"kvray-supervisor"}}


@pytest.mark.parametrize("part", ["engine", "", "b", "shard-", "sharp"])
def test_what_names_nothing_is_refused(part: str) -> None:
    with pytest.raises(ConfigError, match="write shard, mover, lookup, supervisor, or a node"):
        homes(NODES, PARTS, part)


def test_a_node_that_is_gone_is_not_asked() -> None:
    assert homes(GONE, PARTS, "shard").keys() == {ONE}

"""Shards without Ray, on directories of their own."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.owner.ownership import sweep
from kvray.actors.shard.shard import Shard
from kvray.store import Arena
from tests.far import Far
from tests.unit.actors.nodes import Nodes, Tier, make_tier
from tests.unit.actors.shard_process import shard_process
from tests.unit.actors.small_mover import MakeNode, Node, near
from tests.unit.actors.small_shard import Line, open_arena, settings_for, wait_until_serving
from tests.unit.conftest import StartChild
from tests.unit.store.child import Child

StartShard = Callable[..., Shard]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A cluster's directory, which the shard makes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvray-test-") as parent:
        yield Path(parent) / "kvray-test"


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def start_shard(directory: Path, line: Line) -> Iterator[StartShard]:
    """Starts shards named `a` or as told, and ends those that still run."""
    shards: list[Shard] = []

    def start(
        name: str = "a", *, crashed: Callable[[], None] = lambda: None, **changes: Any
    ) -> Shard:
        where = changes.pop("directory", directory)
        shards.append(line.follow(Shard(name, settings_for(where, **changes), crashed)))
        shards[-1].start()
        return shards[-1]

    yield start
    for shard in shards:
        shard.stop(retire=False, timeout_s=10)
    sweep(directory)


@pytest.fixture
def make_shard(start_shard: StartShard) -> StartShard:
    """Starts shards as `start_shard` does, and waits until they serve."""

    def make(*args: Any, **changes: Any) -> Shard:
        made = start_shard(*args, **changes)
        wait_until_serving(made)
        return made

    return make


@pytest.fixture
def shard(make_shard: StartShard) -> Shard:
    return make_shard()


@pytest.fixture
def attach(directory: Path, start_shard: StartShard) -> Iterator[Callable[[], Arena]]:
    """Maps the shard's arena as an engine does, which becomes a holder; unmaps it at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(open_arena(directory)))


@pytest.fixture
def arena(shard: Shard, attach: Callable[[], Arena]) -> Arena:
    return attach()


@pytest.fixture
def child(directory: Path, child_in: StartChild) -> Callable[[], Child]:
    """Starts processes that share the shard's directory."""
    return partial(child_in, directory)


@pytest.fixture
def older(directory: Path) -> Iterator[Far]:
    """A process whose shard is named `a`, as those of `make_shard` are."""
    with shard_process(directory, "a") as process:
        yield process


@pytest.fixture
def tier(request: pytest.FixtureRequest) -> Iterator[Tier]:
    """Two shards; the parameter is settings of both."""
    with make_tier(**getattr(request, "param", {})) as made:
        yield made


@pytest.fixture
async def nodes(directory: Path, request: pytest.FixtureRequest) -> AsyncIterator[Nodes]:
    """The nodes `a`, `b` and `c`, each with 8 slabs or as many as its parameter says."""
    made = Nodes.make(directory, "abc", num_slabs=getattr(request, "param", 8))
    yield made
    made.close()


@pytest.fixture
def make_node(directory: Path) -> Iterator[MakeNode]:
    """Makes nodes with a mover each, which know each other by name.

    With `is_far` the mover is in a process of its own, `node.far`.
    """
    directory.mkdir()
    nodes: list[Node] = []
    peers: dict[str, Any] = {}

    def make(
        name: str, *, asked: dict[str, int] | None = None, is_far: bool = False, **changes: Any
    ) -> Node:
        node = Node(directory / name, name, peers, **(asked or {}))
        nodes.append(node)
        if is_far:
            node.far = Far("tests.unit.actors.small_mover:far_mover", str(node.directory))
            peers[name] = node.far.call
        else:
            peers[name] = near(node.start(**changes))
        return node

    yield make
    for node in nodes:
        node.close()

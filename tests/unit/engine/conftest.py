"""The shard of the connector's tests, and engines of no make."""

from collections.abc import Callable, Iterator

import pytest

from kvray.actors.shard.shard import Shard
from tests.kit.apart import Apart
from tests.kit.connector import PROMPT
from tests.unit.connector.conftest import environment, running_shard, server, shard

__all__ = ["environment", "running_shard", "server", "shard"]

MakeEngine = Callable[..., Apart]


@pytest.fixture
def make_engine(shard: Shard) -> Iterator[MakeEngine]:
    made: list[Apart] = []

    def make(**changes: object) -> Apart:
        made.append(Apart(**changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make_engine: MakeEngine) -> Apart:
    return make_engine()


@pytest.fixture
def stored(make_engine: MakeEngine) -> Apart:
    engine = make_engine()
    engine.serve(PROMPT)
    return engine

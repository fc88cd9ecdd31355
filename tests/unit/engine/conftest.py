"""The shard of the connector's tests, and engines of no make."""

from collections.abc import Callable, Iterator

import pytest

from tests.unit.connector.conftest import environment, running_shard, server, shard
from tests.unit.engine.apart import Apart

__all__ = ["environment", "running_shard", "server", "shard"]

MakeEngine = Callable[..., Apart]


@pytest.fixture
def make_engine(environment: dict[str, str]) -> Iterator[MakeEngine]:
    """Make engines that end with the test."""
    made: list[Apart] = []

    def make(**changes: object) -> Apart:
        made.append(Apart(**changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()

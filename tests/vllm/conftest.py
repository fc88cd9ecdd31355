"""vLLM on two nodes of a real tier, and one without it, which says what is true.

`make test-vllm` runs these in an environment of their own; without vLLM none is collected.
"""

import importlib.util
from collections.abc import Iterator

import pytest

from kvray.lab.chaos.machine import Machine
from tests.kit.ray.cluster import TwoNodes, open_tier
from tests.ray.conftest import local
from tests.vllm.witness import SETTINGS, Truth, Witness, log_shown, start, stop

__all__ = ["local"]

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def tier() -> Iterator[TwoNodes]:
    """A tier on two nodes."""
    with Machine(num_nodes=2) as machine, open_tier(machine, "witness", SETTINGS) as made:
        yield made


@pytest.fixture(scope="session")
def truth(tier: TwoNodes) -> Iterator[Truth]:
    """A vLLM without the connector."""
    plain = start("plain", tier)
    plain.wait_ready()
    yield Truth(plain)
    stop(plain)


@pytest.fixture(scope="module")
def witness(request: pytest.FixtureRequest, tier: TwoNodes, truth: Truth) -> Iterator[Witness]:
    """The engines that a module names in `ENGINES`; memory does not suffice for all at once."""
    names = request.module.ENGINES
    engines = {name: start(name, tier) for name in names}
    try:
        for name, engine in engines.items():
            with log_shown(name, tier):
                engine.wait_ready()
        yield Witness(tier, truth, engines)
    finally:
        for engine in engines.values():
            stop(engine)

"""vLLM on two nodes of a real tier, and one without it, which says what is true.

`make test-vllm` runs these in an environment of their own; without vLLM none is collected.
"""

import importlib.util
from collections.abc import Iterator

import pytest

from kvray.lab.chaos.machine import Machine
from tests.ray.cluster import open_tier
from tests.vllm.witness import SETTINGS, Witness

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def witness() -> Iterator[Witness]:
    """A tier on two nodes, and engines that start when they are first asked."""
    with Machine(num_nodes=2) as machine, open_tier(machine, "witness", SETTINGS) as tier:
        made = Witness(tier)
        try:
            yield made
        finally:
            made.close()

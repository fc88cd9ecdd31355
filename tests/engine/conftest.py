"""Engines on the tiny model, with pools that show any read of a byte nobody wrote."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvray.actors.owner.ownership import sweep
from kvray.config import load_config
from kvray.reference import KvConnectorConfig
from kvray.reference.engine import ReferenceEngine
from kvray.reference.output import Output
from tests.engine import fake_connector
from tests.kit.tier import Tier, tier_environment
from tests.waiting import wait_for

BLOCK = 16
MakeEngine = Callable[..., ReferenceEngine]
Expected = Callable[..., tuple[int, ...]]
KVRAY = KvConnectorConfig()


@pytest.fixture
def fake() -> fake_connector.State:
    return fake_connector.reset()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the ranks' connectors leave their journals."""
    made = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(fake_connector.DIRECTORY_VARIABLE, str(made))
        yield made


def start(model: str | Path = "tiny", **options: Any) -> ReferenceEngine:
    defaults: dict[str, Any] = {"tokens_per_block": BLOCK, "num_blocks": 64, "poison": True}
    return ReferenceEngine(model, **{**defaults, **options})


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Return a maker of engines that end with the test."""
    engines: list[ReferenceEngine] = []

    def make(**options: Any) -> ReferenceEngine:
        engines.append(start(**options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def make_faked(make_engine: MakeEngine, fake: fake_connector.State) -> MakeEngine:
    """Return a maker of engines with the connector over a dict."""
    return partial(make_engine, connector=fake_connector.CONFIG)


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Variables that lead to a tier of this test's own, in children too."""
    with tier_environment(ARENA__CAPACITY="32MiB") as variables:
        yield variables
        sweep(load_config().node_dir)


@pytest.fixture
def tier(environment: dict[str, str]) -> Iterator[Tier]:
    made = Tier()
    yield made
    made.stop()


@pytest.fixture
def make_joined(make_engine: MakeEngine, tier: Tier) -> MakeEngine:
    """Return a maker of engines with KvRay's connector."""
    return partial(make_engine, connector=KVRAY)


@pytest.fixture(scope="session")
def expected() -> Iterator[Expected]:
    """Return a function that answers without reuse, connector, chunks, batch or overlap."""
    with start(enable_block_reuse=False) as engine:
        known: dict[Any, tuple[int, ...]] = {}

        def answer(prompt: list[int], max_tokens: int = 16) -> tuple[int, ...]:
            key = (tuple(prompt), max_tokens)
            if key not in known:
                known[key] = engine.generate(prompt, max_tokens=max_tokens).token_ids
            return known[key]

        yield answer


def check(
    outputs: Sequence[Output], expected: Expected, prompts: list[list[int]], max_tokens: int
) -> None:
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.token_ids == expected(prompt, max_tokens)


def wait_for_the_end_of_its_child(code: str) -> list[int]:
    """Run a program, kill it once it has printed figures, and return these.

    The first one is the number of its child, whose end is waited for.
    """
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        figures = [int(figure) for figure in parent.stdout.readline().split()]
        assert psutil.pid_exists(figures[0])
        parent.kill()
    wait_for(lambda: not psutil.pid_exists(figures[0]))
    return figures


def make_prompt(num_tokens: int, *, seed: int = 0) -> list[int]:
    """Return tokens that look random and depend on the seed from the first one on."""
    return [
        3 + (seed * 7919 + index * (31 + seed) + index * index) % 500 for index in range(num_tokens)
    ]

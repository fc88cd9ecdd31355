"""The example for `ray.serve.llm` as a user has it: two replicas of vLLM share their blocks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvray.actors.tier.local_ray import LocalRay
from kvray.reference.checkpoint import find_smollm2
from tests.kit.ray.command_line import free_port
from tests.kit.ray.served import DEADLINE_S, Served, open_served
from tests.vllm.witness import BLOCK, ENVIRON
from tests.waiting import wait_for

pytest.importorskip("openai")
pytest.importorskip("pyarrow", reason="ray.serve.llm is not installed")

pytestmark = [pytest.mark.ray]

_SHM = Path("/dev/shm")
PROMPT = "The keeper counts the lamps of the third room, one after the other. " * 40


def write(path: Path, *, kvray_config: str) -> int:
    """Write the settings of the example's application; return the port that they name."""
    environ = {"ON_CPU": "1", "MODEL": str(find_smollm2()), "KVRAY_CONFIG": kvray_config}
    application = {
        "name": "llm",
        "import_path": "examples.ray_serve_llm.app:app",
        "runtime_env": {"env_vars": {**ENVIRON, **environ}},
    }
    port = free_port()
    options = {"host": "127.0.0.1", "port": port}
    settings = {"proxy_location": "HeadOnly", "http_options": options}
    path.write_text(yaml.safe_dump({**settings, "applications": [application]}))
    return port


def _queues() -> set[Path]:
    return {*_SHM.glob("psm_*"), *_SHM.glob("sem.mp-*")}


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> None:
    """Look at the session's end alone: vLLM's queues come with a replica, and go with all."""


@pytest.fixture(scope="module")
def served(local: LocalRay) -> Iterator[Served]:
    before = _queues()
    with open_served(local, "serve-llm", write=write) as made:
        yield made
    # Ray kills what vLLM has started, often with the trackers that would remove its queues.
    for queue in _queues() - before:
        queue.unlink(missing_ok=True)


def test_the_second_replica_has_from_the_tier_what_the_first_computed(served):
    def ask() -> tuple[str, int, int]:
        client = served.client.with_options(timeout=DEADLINE_S)  # while the model is loaded
        answer = client.completions.create(
            model="smollm2", prompt=PROMPT, max_tokens=4, temperature=0
        )
        hit = answer.model_extra["kv_transfer_params"]["kvray_hit_tokens"]
        return answer.choices[0].text, answer.usage.prompt_tokens, hit

    text, num_tokens, hit = ask()
    assert hit == 0
    whole = num_tokens // BLOCK
    wait_for(lambda: served.stored() >= whole, "the save")
    found: list[tuple[str, int, int]] = []
    wait_for(lambda: found.append(ask()) or found[-1][2] > 0, "an answer of the other replica")
    assert {one[0] for one in found} == {text}
    assert found[-1][2] == (num_tokens - 1) // BLOCK * BLOCK
    assert len({*served.connected()}) == 2  # with two ranks each

"""Two ranks in processes of their own: each loads and stores its share of a block."""

from collections.abc import Iterator

import pytest

from kvray.lab.vllm import MODULE
from kvray.reference.replica import Replica
from tests.kit.ray.cluster import TwoNodes
from tests.vllm.lives import write_model
from tests.vllm.witness import BLOCK, ENVIRON, stop
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray]

LENGTH = 6 * BLOCK + 5
HIT = 6 * BLOCK
PART_BYTES = 3 * 2 * BLOCK * 64 * 4
"""What a rank has of a block: three layers, keys and values, one head of 64 numbers."""


@pytest.fixture(scope="module")
def engines(tier: TwoNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    """One without the connector and two with it."""
    model = write_model(tmp_path_factory.mktemp("model"), head_dim=64)
    made: list[Replica] = []
    try:
        for name in ("plain-tp", "tp-1", "tp-2"):
            environ = {**ENVIRON, **tier.engine_environ(tier.nodes[0])}
            environ["KVRAY_CONNECTOR__MODEL_KEY"] = "tensor parallel"
            made.append(
                Replica(
                    name,
                    env={**environ, "KVRAY_CONNECTOR__REPLICA": name},
                    log_path=tier.machine.scratch / f"{name}.log",
                    module=MODULE,
                    model=str(model),
                    with_kvray=not name.startswith("plain"),
                    tensor_parallel_size=2,
                    skip_tokenizer_init=True,
                    block_size=BLOCK,
                    dtype="float32",
                    max_model_len=1024,
                    num_blocks=64,
                )
            )
            made[-1].wait_ready()
        yield made
    finally:
        for engine in made:
            stop(engine)


def num_stored(tier: TwoNodes) -> int:
    """Return how many blocks the engines' node has of the model of this module."""
    slabs = tier.serving()[str(tier.node_dir(tier.nodes[0]))]["arena"]["slabs"]
    return sum(one["blocks"] for one in slabs if one["block_bytes"] == PART_BYTES)


def test_a_block_has_a_part_of_each_rank(engines, tier):
    plain, first, second = engines
    prompt = [3 + (index * index) % 500 for index in range(LENGTH)]
    outputs = []
    for engine in (plain, first, second):
        outputs += engine.generate([prompt], max_tokens=16)
        if engine is first:  # each rank commits its own part, perhaps after the answer
            wait_for(lambda: num_stored(tier) == 2 * HIT // BLOCK, "both parts of every block")
    assert [output.token_ids for output in outputs] == [outputs[0].token_ids] * 3
    assert [output.hit_tokens for output in outputs] == [0, 0, HIT]

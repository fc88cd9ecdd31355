"""What a tier of several nodes holds, as its index says it."""

from kvray.lab.replay.fleet.plan import Memory
from kvray.routing import Stretch
from tests.unit.lab.replay.fleet.synthetic import plan, trace_of

TRACE = trace_of((0, "abcd"))


def test_blocks_of_a_prompt_are_found_with_their_nodes() -> None:
    memory = Memory(TRACE, plan(2))
    memory.use(0, [0, 1, 2])
    memory.use(1, [0])
    assert memory.stretches([0, 1, 2, 3], 400) == [
        Stretch(num_tokens=100, holders={"0": "host", "1": "host"}),
        Stretch(num_tokens=200, holders={"0": "host"}),
    ]


def test_a_prefix_ends_at_its_first_gap() -> None:
    memory = Memory(TRACE, plan(1, host_blocks=2))
    memory.use(0, [0, 1, 2, 3])
    assert memory.stretches([0, 1, 2, 3], 350) == [Stretch(num_tokens=200, holders={"0": "host"})]
    assert memory.stretches([2, 3], 200) == []


def test_what_leaves_memory_is_on_disk() -> None:
    memory = Memory(TRACE, plan(1, host_blocks=2, disk_blocks=1))
    memory.use(0, [0, 1, 2, 3])
    assert memory.stretches([0, 1, 2, 3], 400) == [
        Stretch(num_tokens=200, holders={"0": "host"}),
        Stretch(num_tokens=100, holders={"0": "disk"}),
    ]


def test_the_last_block_may_be_partial() -> None:
    memory = Memory(TRACE, plan(1))
    memory.use(0, [0, 1])
    assert memory.stretches([0, 1], 130)[0].num_tokens == 130

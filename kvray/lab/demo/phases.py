"""The phases of the demo: each sends prompts to engines."""

from collections.abc import Callable
from dataclasses import dataclass

from kvray.lab.demo.engines import TOKENS_PER_BLOCK, Engines, shareable_tokens
from kvray.lab.demo.prompts import LONG_BLOCKS, OFFLOAD_BLOCKS, Prompts
from kvray.lab.demo.record import WITH_KVRAY, WITHOUT_KVRAY, Record

ONE, TWO = "replica-1", "replica-2"
ORACLE = "oracle"

_POOL_BLOCKS = LONG_BLOCKS + 2
"""The blocks of the long prompt and its answer, and one more."""
_OFFLOAD_POOL_BLOCKS = OFFLOAD_BLOCKS + 1
"""Room for one prompt of phase c with its answer, and for nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase; `num_steps` counts the starts and prompts in `play`."""

    name: str
    title: str
    num_steps: int
    play: Callable[[Engines, Prompts], None]


def ask_oracle(engines: Engines, prompts: Prompts) -> None:
    """Answer every prompt with an engine that has no connector and reuses nothing."""
    engines.start(ORACLE, num_blocks=_POOL_BLOCKS, with_kvray=False, with_reuse=False)
    for prompt in prompts.all():
        engines.ask(ORACLE, ORACLE, prompt)
    engines.end(ORACLE)


def share_long_prompts(engines: Engines, prompts: Prompts) -> None:
    """Phase a: replica 1 computes prompts, replica 2 copies their blocks."""
    engines.start(ONE, TWO, num_blocks=_POOL_BLOCKS)
    for prompt in (prompts.long, prompts.unaligned):
        shared = shareable_tokens(len(prompt.token_ids))
        engines.ask("a", ONE, prompt, expected_hit_tokens=0, until_saved=True)
        engines.ask("a", TWO, prompt, expected_hit_tokens=shared)


def share_system_prompt(engines: Engines, prompts: Prompts) -> None:
    """Phase b: prompts that differ after a common beginning share the beginning."""
    first, second, third = prompts.same_system
    shared = common_tokens(first.token_ids, second.token_ids)
    engines.ask("b", ONE, first, expected_hit_tokens=0, until_saved=True)
    engines.ask("b", TWO, second, expected_hit_tokens=shared)
    engines.ask("b", ONE, third)


def offload(engines: Engines, prompts: Prompts) -> None:
    """Phase c: A, B, A, B on a pool that holds one of them, without kvray and with it."""
    for name in (WITHOUT_KVRAY, WITH_KVRAY):
        with_kvray = name == WITH_KVRAY
        engines.start(name, num_blocks=_OFFLOAD_POOL_BLOCKS, with_kvray=with_kvray)
        for is_first in (True, False):
            for prompt in (prompts.offload_a, prompts.offload_b):
                engines.ask("c", name, prompt, until_saved=with_kvray and is_first)
        engines.end(name)


def restart(engines: Engines, prompts: Prompts) -> None:
    """Phase d: both replicas restart, and their first prompt hits at once."""
    engines.end(ONE, TWO)
    engines.start(ONE, TWO, num_blocks=_POOL_BLOCKS)
    for replica, prompt in ((ONE, prompts.long), (TWO, prompts.unaligned)):
        shared = shareable_tokens(len(prompt.token_ids))
        engines.ask("d", replica, prompt, expected_hit_tokens=shared)
    engines.end(ONE, TWO)


ORACLE_PHASE = Phase(
    name=ORACLE, title="The answers without any reuse", num_steps=8, play=ask_oracle
)
PHASES = (
    Phase(name="a", title="one long prompt on two replicas", num_steps=5, play=share_long_prompts),
    Phase(
        name="b", title="one system prompt, three questions", num_steps=3, play=share_system_prompt
    ),
    Phase(name="c", title="A, B, A, B on a pool for one", num_steps=10, play=offload),
    Phase(name="d", title="both replicas restarted", num_steps=3, play=restart),
)


def common_tokens(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many leading tokens two prompts share in full blocks."""
    pairs = enumerate(zip(one, other, strict=False))
    count = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
    return count // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK


def split_oracle(records: list[Record]) -> tuple[dict[str, Record], list[Record]]:
    """Return the oracle's answers by prompt, and all other records."""
    oracle = {record.prompt: record for record in records if record.phase == ORACLE}
    return oracle, [record for record in records if record.phase != ORACLE]

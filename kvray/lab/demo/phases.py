"""The phases of the demo: each sends prompts to engines."""

from collections.abc import Callable
from typing import NamedTuple

from kvray.lab.demo import prompts
from kvray.lab.demo.engines import Engines
from kvray.lab.demo.prompts import shareable_tokens
from kvray.lab.demo.record import ORACLE, WITH_KVRAY, WITHOUT_KVRAY

ONE, TWO = "replica-1", "replica-2"

_POOL_BLOCKS = prompts.LONG_BLOCKS + 2
"""The blocks of the long prompt and its answer, and one more."""
_OFFLOAD_POOL_BLOCKS = prompts.OFFLOAD_BLOCKS + 1
"""Room for one prompt of phase c with its answer, and for nothing else."""


class Phase(NamedTuple):
    """One phase; `num_steps` counts the starts and prompts in `play`."""

    name: str
    title: str
    num_steps: int
    play: Callable[[Engines], None]


def ask_oracle(engines: Engines) -> None:
    """Answer every prompt with an engine that has no connector and reuses nothing."""
    engines.start(ORACLE, num_blocks=_POOL_BLOCKS, with_kvray=False, with_reuse=False)
    for prompt in engines.prompts:
        engines.ask(ORACLE, ORACLE, prompt)
    engines.end(ORACLE)


def share_long_prompts(engines: Engines) -> None:
    """Phase a: replica 1 computes prompts, replica 2 copies their blocks."""
    engines.start(ONE, TWO, num_blocks=_POOL_BLOCKS)
    for prompt in (prompts.LONG, prompts.UNALIGNED):
        shared = shareable_tokens(len(engines.prompts[prompt]))
        engines.ask("a", ONE, prompt, expected_hit_tokens=0, until_saved=True)
        engines.ask("a", TWO, prompt, expected_hit_tokens=shared)


def share_system_prompt(engines: Engines) -> None:
    """Phase b: prompts that differ after a common beginning share the beginning."""
    first, second, third = prompts.SAME_SYSTEM
    engines.ask("b", ONE, first, expected_hit_tokens=0, until_saved=True)
    engines.ask(
        "b", TWO, second, expected_hit_tokens=prompts.SYSTEM_BLOCKS * prompts.TOKENS_PER_BLOCK
    )
    engines.ask("b", ONE, third)


def offload(engines: Engines) -> None:
    """Phase c: A, B, A, B on a pool that holds one of them, without kvray and with it."""
    for name in (WITHOUT_KVRAY, WITH_KVRAY):
        with_kvray = name == WITH_KVRAY
        engines.start(name, num_blocks=_OFFLOAD_POOL_BLOCKS, with_kvray=with_kvray)
        for is_first in (True, False):
            for prompt in (prompts.OFFLOAD_A, prompts.OFFLOAD_B):
                engines.ask("c", name, prompt, until_saved=with_kvray and is_first)
        engines.end(name)


def restart(engines: Engines) -> None:
    """Phase d: both replicas restart, and their first prompt hits at once."""
    engines.end(ONE, TWO)
    engines.start(ONE, TWO, num_blocks=_POOL_BLOCKS)
    for replica, prompt in ((ONE, prompts.LONG), (TWO, prompts.UNALIGNED)):
        shared = shareable_tokens(len(engines.prompts[prompt]))
        engines.ask("d", replica, prompt, expected_hit_tokens=shared)
    engines.end(ONE, TWO)


ORACLE_PHASE = Phase(ORACLE, "The answers without any reuse", 8, ask_oracle)
PHASES = (
    Phase("a", "one long prompt on two replicas", 5, share_long_prompts),
    Phase("b", "one system prompt, three questions", 3, share_system_prompt),
    Phase("c", "A, B, A, B on a pool for one", 10, offload),
    Phase("d", "both replicas restarted", 3, restart),
)

"""The phases of the demo, each a plain function over a stage."""

from collections.abc import Callable
from dataclasses import dataclass

from kvray.cli.demo.prompts import LONG_BLOCKS, OFFLOAD_BLOCKS, Prompts
from kvray.cli.demo.record import WITH_KVRAY, WITHOUT_KVRAY, Record
from kvray.cli.demo.stage import TOKENS_PER_BLOCK, Engine, Stage, shareable_tokens

ONE, TWO = "replica-1", "replica-2"
ORACLE = "oracle"

_POOL_BLOCKS = LONG_BLOCKS + 2
"""What the long prompt and its answer need, and one more."""
_OFFLOAD_POOL_BLOCKS = OFFLOAD_BLOCKS + 1
"""Room for one prompt of phase c with its answer, and for nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase, for the bars and the table."""

    name: str
    title: str
    num_steps: int
    play: Callable[[Stage, Prompts], None]


def ask_oracle(stage: Stage, prompts: Prompts) -> None:
    """Answer every prompt with an engine that has no connector and reuses nothing."""
    stage.start(Engine(name=ORACLE, num_blocks=_POOL_BLOCKS, with_kvray=False, with_reuse=False))
    for prompt in prompts.all():
        stage.ask(ORACLE, ORACLE, prompt)
    stage.end(ORACLE)


def share_long_prompts(stage: Stage, prompts: Prompts) -> None:
    """Phase a: what replica 1 has read, replica 2 copies."""
    _start_replicas(stage)
    for prompt in (prompts.long, prompts.unaligned):
        shared = shareable_tokens(len(prompt.token_ids))
        stage.ask("a", ONE, prompt, expected_hit_tokens=0, until_saved=True)
        stage.ask("a", TWO, prompt, expected_hit_tokens=shared)


def share_system_prompt(stage: Stage, prompts: Prompts) -> None:
    """Phase b: prompts that differ after a common beginning share the beginning."""
    first, second, third = prompts.same_system
    shared = common_tokens(first.token_ids, second.token_ids)
    stage.ask("b", ONE, first, expected_hit_tokens=0, until_saved=True)
    stage.ask("b", TWO, second, expected_hit_tokens=shared)
    stage.ask("b", ONE, third)


def offload(stage: Stage, prompts: Prompts) -> None:
    """Phase c: A, B, A, B on a pool that holds one of them, without kvray and with it."""
    for name, with_kvray in ((WITHOUT_KVRAY, False), (WITH_KVRAY, True)):
        stage.start(Engine(name=name, num_blocks=_OFFLOAD_POOL_BLOCKS, with_kvray=with_kvray))
        for is_first in (True, False):
            for prompt in (prompts.offload_a, prompts.offload_b):
                stage.ask("c", name, prompt, until_saved=with_kvray and is_first)
        stage.end(name)


def restart(stage: Stage, prompts: Prompts) -> None:
    """Phase d: both replicas start anew, and their first prompt hits at once."""
    stage.end(ONE, TWO)
    _start_replicas(stage)
    for replica, prompt in ((ONE, prompts.long), (TWO, prompts.unaligned)):
        shared = shareable_tokens(len(prompt.token_ids))
        stage.ask("d", replica, prompt, expected_hit_tokens=shared)
    stage.end(ONE, TWO)


ORACLE_PHASE = Phase(
    name=ORACLE, title="the answers without any reuse", num_steps=8, play=ask_oracle
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
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK


def oracle_answers(stage: Stage) -> dict[str, Record]:
    """Take the oracle's answers off the stage's records."""
    answers = {record.prompt: record for record in stage.records if record.phase == ORACLE}
    stage.records = [record for record in stage.records if record.phase != ORACLE]
    return answers


def _start_replicas(stage: Stage) -> None:
    stage.start(*(Engine(name=name, num_blocks=_POOL_BLOCKS) for name in (ONE, TWO)))

"""Asks the parts of the tier why the blocks of a request or a prompt were hit or missed.

Answers are plain mappings, as `kvray explain --json` prints them; ranges are in tokens.

The states of a prompt's blocks are derived from the answers of all shards.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from kvray.actors.ray_glue.arguments import in_pieces
from kvray.actors.ray_glue.calls import ask_shards, call, get_actor
from kvray.actors.shard.actor_requests import Asked, Prompt, Whereabouts
from kvray.errors import ConfigError, KVRayError
from kvray.identity.block import KEY_BYTES
from kvray.store.block_history import CAUSES, TIERS
from kvray.trace.arrival import runs_between

STORED = "stored"
PARTIAL = "partial"  # only some of its parts are stored, so it is of no use
EVICTED = "evicted"
NEVER_STORED = "never_stored"  # or so long ago that no shard remembers


class BlockState(NamedTuple):
    """The state of one block."""

    state: str
    places: tuple[tuple[str, str], ...] = ()
    """(shard, tier) of the shards that have it whole, else of those that have some of it."""
    node: str = ""
    """The shard whose tier it left last."""
    tier: str = ""
    cause: str = ""
    """Why it left, of `block_history.CAUSES`."""
    at: float = 0.0
    """When it left, in seconds since the epoch; 0: it did not."""


def block_states(
    answers: Mapping[str, Whereabouts], num_blocks: int, *, num_parts: int, past: bool = False
) -> list[BlockState]:
    """Return the state of each of `num_blocks` blocks, from the answers by shard.

    For a question about the `past`, an eviction outweighs that the block is stored now.
    """
    return [_block_state(answers, block, num_parts, past=past) for block in range(num_blocks)]


def state_runs(found: Sequence[BlockState]) -> Iterator[tuple[int, list[BlockState]]]:
    """Yield start and blocks of each run of equal states, save for when the blocks left."""
    start = 0
    for _, run in groupby(found, lambda block: block._replace(at=0.0)):
        blocks = list(run)
        yield start, blocks
        start += len(blocks)


def _block_state(
    answers: Mapping[str, Whereabouts], block: int, num_parts: int, *, past: bool
) -> BlockState:
    whole: list[tuple[str, str]] = []
    some: list[tuple[str, str]] = []
    total = 0
    latest, node = 0.0, ""
    for shard, one in answers.items():
        either = int(one.either[block])
        if either:
            total += either
            tier = "host" if one.host[block] == either else "nvme"
            (whole if either >= num_parts else some).append((shard, tier))
        if one.left_at[block] > latest:
            latest, node = float(one.left_at[block]), shard
    # The parts of an engine that spans nodes are on several.
    places = tuple(whole or some)
    state = STORED if whole or total >= num_parts else PARTIAL if some else NEVER_STORED
    left = BlockState(EVICTED)
    if latest:
        tier, cause = answers[node].left_tier[block], answers[node].left_by[block]
        left = BlockState(EVICTED, places, node, TIERS[tier], CAUSES[cause], latest)
    if latest and (past or state == NEVER_STORED):
        return left
    if state == PARTIAL:
        return left._replace(state=PARTIAL, places=places)
    return BlockState(state, places)


_ARRIVES_S = 2.5
"""How long a request may take to be reported: its engine does so once a second."""
_POLL_S = 0.25
_NAMESPACES_MAX = 8


def explain_requests(
    *, replica: str | None, request: int | str | None, last: int, timeout_s: float
) -> dict[str, Any]:
    """Return the outcomes of the `last` requests and their reasons, the latest first.

    Without `replica` or `request` all requests count. The result has "requests", and "silent":
    the shards that did not answer.
    """
    deadline = time.monotonic() + _ARRIVES_S
    while True:
        found, silent = _ask("asked", timeout_s, replica, request, last)
        if any(found.values()) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    asked = [(shard, one) for shard, some in found.items() for one in some]
    asked.sort(key=lambda pair: -pair[1].note.at)
    if not asked:
        raise ConfigError(_not_known(replica, request, silent))
    requests = []
    for shard, one in asked[:last]:
        explained, without = _explained(shard, one, timeout_s)
        requests.append(explained)
        silent += [name for name in without if name not in silent]
    return {"requests": requests, "silent": silent}


def explain_prompt(
    tokens: bytes,
    *,
    replica: str | None,
    salt: str | int | None,
    lora: str | None,
    timeout_s: float,
) -> dict[str, Any]:
    """Return the blocks of a prompt that are stored now, and the history of the others.

    `tokens` are little-endian int32, end to end; `lora` is the adapter's path on the nodes. Without
    `replica` it looks in the namespace of every registered replica. The result has "prompts", one a
    namespace, and "silent".
    """
    found, all_silent = [], set()
    for name, shard in list(_homes(replica, timeout_s).items())[:_NAMESPACES_MAX]:
        method = get_actor(shard).prompt
        prompt: Prompt = call(method, name, tokens, salt, lora, timeout_s=timeout_s)
        answers, silent = _whereabouts(prompt.keys, None, timeout_s)
        found.append(_prompt(name, prompt, len(tokens) // 4, answers, timeout_s))
        all_silent |= set(silent)
    return {"prompts": found, "silent": sorted(all_silent)}


# -- requests -------------------------------------------------------------------------------------


def _explained(shard: str, asked: Asked, timeout_s: float) -> tuple[dict[str, Any], Sequence[str]]:
    """Return what came of a request, and the shards that did not say what became of its blocks."""
    note, size = asked.note, asked.note.tokens_per_block
    num_parts = asked.namespace.num_parts if asked.namespace else 1
    ranges = []
    if note.first:
        ranges.append(_range(0, note.first * size, "own"))
    for start, stop, way, source in runs_between(note.arrivals, note.first, note.end):
        ranges.append(_range(start * size, stop * size, "hit", way=way, source=source))
    since, missed = 0.0, Counter[str]()
    answers, silent = dict[str, Whereabouts](), list[str]()
    if note.keys:
        answers, silent = _whereabouts(b"".join(note.keys), note.at, timeout_s)
        since = max((one.since for one in answers.values()), default=0.0)
        found = block_states(answers, len(note.keys), num_parts=num_parts, past=True)
        for first, run in state_runs(found):
            start = note.end + first * note.step
            stop = min(note.wanted, start + len(run) * note.step)
            reason = _reason(asked, run[0])
            ranges.append(_run_range(run, start * size, stop * size, "miss", reason=reason))
            missed[reason] += (stop - start) * size
    elif note.wanted > note.end:  # a prompt that had no keys yet
        start, stop = note.end * size, note.wanted * size
        ranges.append(_range(start, stop, "miss", reason=note.reason, places=[]))
        missed[note.reason] += stop - start
    if note.num_tokens > note.wanted * size:
        ranges.append(_range(note.wanted * size, note.num_tokens, "computed"))
    ours = asked.namespace
    return {
        "request_id": note.request_id,
        "name": note.name,
        "replica": asked.replica,
        "rank": asked.rank,
        "node": shard,
        "at": note.at,
        "namespace": "" if ours is None else ours.digest().hex()[:8],
        "num_tokens": note.num_tokens,
        "tokens_per_block": size,
        "own_tokens": note.first * size,
        "hit_tokens": max(0, note.end - note.first) * size,
        "missed_tokens": missed.total(),
        "reason": missed.most_common(1)[0][0] if missed else note.reason,
        "stage_s": round(note.stage_s, 6),
        "lease_s": round(note.lease_s, 6),
        "ranges": ranges,
        "is_sampled": note.step > 1,
        "log_since": since,
        "leaving": sorted({*_leaving(answers), *([shard] if asked.is_leaving else [])}),
    }, silent


def _reason(asked: Asked, block: BlockState) -> str:
    """Return why a range was missed: `not_stored` has several reasons."""
    reason = asked.note.reason
    if reason != "not_stored":
        return reason
    return block.state if block.state in (EVICTED, PARTIAL) else NEVER_STORED


def _not_known(replica: str | None, request: int | str | None, silent: Sequence[str]) -> str:
    what = "No request" if request is None else f"No request {request!s:.80}"
    whose = "" if replica is None else f" of replica {replica!r:.80}"
    missing = f" {', '.join(silent)} did not answer." if silent else ""
    return (
        f"{what}{whose} is known: shards remember the latest requests of their node since they"
        f" started, and a TensorCache notes none.{missing} `kvray status` shows the counts of"
        " replicas and caches."
    )


# -- prompts --------------------------------------------------------------------------------------


def _prompt(
    replica: str,
    prompt: Prompt,
    num_tokens: int,
    answers: Mapping[str, Whereabouts],
    timeout_s: float,
) -> dict[str, Any]:
    namespace, size = prompt.namespace, prompt.namespace.tokens_per_block
    num_blocks = len(prompt.keys) // KEY_BYTES
    found = block_states(answers, num_blocks, num_parts=namespace.num_parts)
    ranges = [
        _run_range(run, start * size, (start + len(run)) * size, run[0].state)
        for start, run in state_runs(found)
    ]
    if num_tokens > num_blocks * size:
        ranges.append(_range(num_blocks * size, num_tokens, "computed"))
    states = [block.state for block in found]
    stored = next((at for at, state in enumerate(states) if state != STORED), num_blocks)
    reason = states[stored] if stored < num_blocks else "none"
    return {
        "replica": replica,
        "namespace": namespace.digest().hex()[:8],
        "num_tokens": num_tokens,
        "tokens_per_block": size,
        "stored_tokens": stored * size,
        "reason": reason,
        "ranges": ranges,
        "log_since": max((one.since for one in answers.values()), default=0.0),
        "leaving": sorted(_leaving(answers)),
    }


def _homes(replica: str | None, timeout_s: float) -> dict[str, str]:
    """Return replica -> a shard where it is registered; without a name, one of each namespace."""
    homes: dict[str, str] = {}
    seen: set[str] = set()
    for name, status in _ask("status", timeout_s)[0].items():
        for one in status.get("replicas", ()):
            is_meant = replica == one["replica"] if replica else one["namespace"] not in seen
            if one["connected"] and is_meant and one["replica"] not in homes:
                homes[one["replica"]] = name
                seen.add(one["namespace"])
    if not homes:
        which = "No replica" if replica is None else f"No replica {replica!r:.80}"
        raise ConfigError(
            f"{which} is registered now, and only a replica knows how to key a prompt;"
            " `kvray status` shows those that are."
        )
    return homes


# -- both -----------------------------------------------------------------------------------------


def _ask(method: str, timeout_s: float, *args: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the answers of the shards, and the names of those without one."""
    answers = ask_shards(method, timeout_s, *args)
    silent = [name for name, answer in answers.items() if isinstance(answer, KVRayError)]
    return {name: one for name, one in answers.items() if name not in silent}, silent


def _whereabouts(
    keys: bytes, before: float | None, timeout_s: float
) -> tuple[dict[str, Whereabouts], list[str]]:
    if not keys:
        return {}, []
    return _ask("whereabouts", timeout_s, before, *in_pieces(keys))


def _leaving(answers: Mapping[str, Whereabouts]) -> set[str]:
    """Return the shards whose nodes are to go."""
    return {name for name, one in answers.items() if one.is_leaving}


def _range(start: int, stop: int, what: str, **more: Any) -> dict[str, Any]:
    return {"start": start, "stop": stop, "what": what, **more}


def _run_range(
    run: Sequence[BlockState], start: int, stop: int, what: str, **more: Any
) -> dict[str, Any]:
    """Return a range with the places of its blocks, and when, whence and why they left."""
    block = run[0]
    if block.at:
        more |= {
            "left_at": [min(one.at for one in run), max(one.at for one in run)],
            "left_node": block.node,
            "left_tier": block.tier,
            "left_by": block.cause,
        }
    places = [{"node": shard, "tier": tier} for shard, tier in block.places]
    return _range(start, stop, what, **more, places=places)

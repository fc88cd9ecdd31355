"""The demo's records of its requests, and the verdict on them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One answered request.

    `reused_tokens` came from the engine's own pool, `hit_tokens` from the tier.
    """

    phase: str
    replica: str
    prompt: str
    prompt_tokens: int
    reused_tokens: int
    hit_tokens: int
    ttft_s: float
    text: str
    token_ids: tuple[int, ...]
    expected_hit_tokens: int | None = None
    """What the tier must give, neither less nor more; None: anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the demo showed its claims; `failures` has a sentence for each that it did not."""

    identical_text: bool
    wrong_tokens: int
    ttft_ratio: float
    failures: tuple[str, ...]


WITH_KVRAY = "with kvray"
WITHOUT_KVRAY = "without kvray"
"""Names of the two replicas of phase c."""


def judge(records: Sequence[Record], *, oracle: dict[str, Record]) -> Verdict:
    """Compare all answers with the oracle's, and all hits with the expected ones.

    Args:
        records: the requests of all phases, in order.
        oracle: prompt -> the answer of an engine that reuses nothing and has no connector.
    """
    wrong = [(record, count_wrong(record, oracle[record.prompt])) for record in records]
    failures = [
        f"Phase {record.phase}: {record.replica} answered {record.prompt!r} with {count} other"
        " tokens than an engine without any reuse."
        for record, count in wrong
        if count
    ]
    failures += [
        f"Phase {record.phase}: {record.replica} found {record.hit_tokens} tokens of"
        f" {record.prompt!r} in the tier, and should have found {record.expected_hit_tokens}."
        for record in records
        if record.expected_hit_tokens not in (None, record.hit_tokens)
    ]
    without, with_kvray = (found_tokens(records, one) for one in (WITHOUT_KVRAY, WITH_KVRAY))
    if without != 0 or with_kvray == 0:
        failures.append(
            f"Phase c: {without} tokens were reused without kvray, and should have been none;"
            f" {with_kvray} were reused with it, and should have been most."
        )
    return Verdict(
        identical_text=not any(
            count or record.text != oracle[record.prompt].text for record, count in wrong
        ),
        wrong_tokens=sum(count for _, count in wrong),
        ttft_ratio=ttft_ratio(records),
        failures=tuple(failures),
    )


def count_wrong(record: Record, truth: Record) -> int:
    """Return how many tokens of an answer differ, missing and surplus ones included."""
    ours, theirs = record.token_ids, truth.token_ids
    differing = sum(a != b for a, b in zip(ours, theirs, strict=False))
    return differing + abs(len(ours) - len(theirs))


def found_tokens(records: Sequence[Record], replica: str) -> int:
    """Return how many tokens a replica found, in its own pool or in the tier."""
    mine = [record for record in records if record.replica == replica]
    return sum(record.reused_tokens + record.hit_tokens for record in mine)


def ttft_ratio(records: Sequence[Record]) -> float:
    """Return cold over shared time to first token, of the first prompt of phase a."""
    cold, shared = [record.ttft_s for record in records if record.phase == "a"][:2]
    return cold / max(shared, 1e-9)

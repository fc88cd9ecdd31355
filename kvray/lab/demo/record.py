"""The demo's records of its requests, and the verdict on them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvray.reference import Output
from kvray.reference.output import count_wrong

ORACLE = "oracle"
"""The phase, and its only replica, without a connector and without any reuse."""
WITH_KVRAY = "with kvray"
WITHOUT_KVRAY = "without kvray"
"""Names of the two replicas of phase c."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One answered request."""

    phase: str
    replica: str
    prompt: str
    output: Output
    expected_hit_tokens: int | None = None
    """Tokens that the tier must give, neither less nor more; None: any number."""

    @property
    def text(self) -> str:
        """The answer as it can be printed: a tiny model answers with any bytes."""
        return self.output.text.encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the demo showed its claims; `failures` has a sentence for each that it did not."""

    identical_text: bool
    wrong_tokens: int
    ttft_ratio: float
    failures: tuple[str, ...]


def judge(records: Sequence[Record], *, oracle: dict[str, Record]) -> Verdict:
    """Compare all answers with the oracle's, and all hits with the expected ones.

    Args:
        records: the requests of all phases, in order.
        oracle: prompt -> its answer without any reuse.
    """
    truths = [oracle[record.prompt] for record in records]
    wrong = [
        count_wrong(record.output.token_ids, truth.output.token_ids)
        for record, truth in zip(records, truths, strict=True)
    ]
    failures = [
        f"Phase {record.phase}: {record.replica} answered {record.prompt!r} with {count} other"
        " tokens than an engine without any reuse."
        for record, count in zip(records, wrong, strict=True)
        if count
    ]
    failures += [
        f"Phase {record.phase}: {record.replica} found {record.output.hit_tokens} tokens of"
        f" {record.prompt!r} in the tier, and should have found {record.expected_hit_tokens}."
        for record in records
        if record.expected_hit_tokens not in (None, record.output.hit_tokens)
    ]
    without, with_kvray = (found_tokens(records, one) for one in (WITHOUT_KVRAY, WITH_KVRAY))
    if without != 0 or with_kvray == 0:
        failures.append(
            f"Phase c: {without} tokens were reused without kvray, and should have been none;"
            f" {with_kvray} were reused with it, and should have been most."
        )
    same_text = [one.text == truth.text for one, truth in zip(records, truths, strict=True)]
    return Verdict(
        identical_text=all(same_text) and not any(wrong),
        wrong_tokens=sum(wrong),
        ttft_ratio=ttft_ratio(records),
        failures=tuple(failures),
    )


def found_tokens(records: Sequence[Record], replica: str) -> int:
    """Return how many tokens a replica found, in its own pool or in the tier."""
    mine = [record.output for record in records if record.replica == replica]
    return sum(output.reused_tokens + output.hit_tokens for output in mine)


def ttft_ratio(records: Sequence[Record]) -> float:
    """Return cold over shared time to first token, of the first prompt of phase a."""
    cold, shared = [record.output.ttft_s for record in records if record.phase == "a"][:2]
    return cold / max(shared, 1e-9)

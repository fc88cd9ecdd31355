"""The result of a replay: hits, writes and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvray.store.replay.trace import Ints, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One trace replayed through one policy, or a bound, at one size."""

    policy: str
    admission: str | None = None
    """It decides which blocks the NVMe tier takes; None without that tier."""
    host_blocks: int | None
    """None: infinite."""
    nvme_blocks: int = 0
    """Size of the NVMe tier; 0 without one."""
    refs: int
    """Blocks that the requests asked for."""
    prompt_tokens: int
    hit_blocks: int
    """Blocks of the contiguous prefixes that were found, in either tier."""
    hit_tokens: int
    host_hit_blocks: int = 0
    nvme_hit_blocks: int = 0
    nvme_written_blocks: int = 0
    seconds: float = 0.0
    """CPU time of the replay."""
    gain: float | None = None
    """Its part of the blocks that Belady finds and LRU does not; None if there are none."""
    write_share: float | None = None
    """Its writes to disk over those of LRU with a disk that takes everything; None if none."""

    @classmethod
    def of(cls, trace: Trace, hits: Ints, **fields: Any) -> Outcome:
        """Return the outcome of a trace whose request `r` found `hits[r]` blocks."""
        return cls(
            refs=trace.num_refs,
            prompt_tokens=trace.prompt_tokens,
            hit_blocks=int(hits.sum()),
            hit_tokens=trace.hit_tokens(hits),
            **fields,
        )

    @property
    def title(self) -> str:
        """The name of the policy, and of the admission if there is one."""
        return self.policy if self.admission is None else f"{self.policy} + {self.admission}"

    @property
    def hit_ratio(self) -> float:
        """Blocks found over blocks asked for."""
        return self.hit_blocks / max(1, self.refs)

    @property
    def token_hit_ratio(self) -> float:
        """Tokens in blocks that were found over tokens of all prompts."""
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def refs_per_s(self) -> float:
        """Blocks asked for in each second of CPU time; 0 if that was too short to be measured."""
        return self.refs / self.seconds if self.seconds else 0.0

    @property
    def written_per_hit(self) -> float | None:
        """Bytes written to the NVMe tier over bytes found there; None if nothing was."""
        return self.nvme_written_blocks / self.nvme_hit_blocks if self.nvme_hit_blocks else None

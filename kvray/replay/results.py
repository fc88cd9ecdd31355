"""What a replay found: hits, writes and time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One trace replayed through one policy at one size."""

    policy: str
    admission: str | None
    """What decided which blocks the NVMe tier takes; None where there is none."""
    host_blocks: int
    nvme_blocks: int
    """Size of the NVMe tier; 0 without one."""
    requests: int
    refs: int
    """Blocks that the requests asked for."""
    prompt_tokens: int
    hit_blocks: int
    """Blocks of the contiguous prefixes that were found, in either tier."""
    hit_tokens: int
    host_hit_blocks: int
    nvme_hit_blocks: int
    nvme_written_blocks: int
    seconds: float
    """CPU time of the replay."""

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

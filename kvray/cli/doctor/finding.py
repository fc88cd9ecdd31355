"""What a check of `kvray doctor` found."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "hint", "fault", "skipped"]
"""`hint`: it works, but not as well as it could. `fault`: it does not work. `skipped`: could not be
looked at, and `says` has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    """What was looked at, in a word or two."""
    verdict: Verdict
    says: str
    """What was found, as a sentence."""
    fix: str = ""
    """What to do; there is one for every hint and every fault."""


def ok(check: str, says: str) -> Finding:
    """Return that `check` found nothing wrong."""
    return Finding(check=check, verdict="ok", says=says)


def hint(check: str, says: str, fix: str) -> Finding:
    """Return what could be better."""
    return Finding(check=check, verdict="hint", says=says, fix=fix)


def fault(check: str, says: str, fix: str) -> Finding:
    """Return what does not work."""
    return Finding(check=check, verdict="fault", says=says, fix=fix)


def skipped(check: str, says: str) -> Finding:
    """Return why `check` could not look."""
    return Finding(check=check, verdict="skipped", says=says)

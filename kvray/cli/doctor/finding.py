"""The result of one check of `kvray doctor`."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "hint", "fault", "skipped"]
"""`hint`: it works, but not as well as it could. `fault`: it does not work. `skipped`: it was not
checked, and `says` has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    """The thing that was checked, in a word or two."""
    verdict: Verdict
    says: str
    """The result, as a sentence without its full stop."""
    fix: str = ""
    """The remedy; every hint and every fault has one."""


def ok(check: str, says: str) -> Finding:
    """Return that `check` found nothing wrong."""
    return Finding(check=check, verdict="ok", says=says)


def hint(check: str, says: str, fix: str) -> Finding:
    """Return that `check` works, but could be better."""
    return Finding(check=check, verdict="hint", says=says, fix=fix)


def fault(check: str, says: str, fix: str) -> Finding:
    """Return that `check` does not work."""
    return Finding(check=check, verdict="fault", says=says, fix=fix)


def skipped(check: str, says: str) -> Finding:
    """Return why nothing was checked."""
    return Finding(check=check, verdict="skipped", says=says)

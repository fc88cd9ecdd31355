"""How many examples a property test tries."""

from hypothesis import settings

SOME, ALL = "some", "all"
"""The profiles of `make test` and `make test-long`, see `conftest.py`."""


def examples(count: int) -> int:
    """Return `count` in `make test-long`, which tries all, and otherwise a sixth of it."""
    return count if settings.get_current_profile_name() == ALL else max(count // 6, 4)

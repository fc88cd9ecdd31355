"""The commands of the lab are run as those of `tests/unit/cli` are."""

from tests.unit.cli.conftest import *  # noqa: F403

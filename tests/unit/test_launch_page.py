"""docs/launch.md: its table of settings says what the code decides."""

import re
from pathlib import Path

from kvray.actors.tier.changes import EFFECTS

PAGE = Path(__file__).parents[2] / "docs" / "launch.md"


def table() -> dict[str, str]:
    """Return setting -> what the page says that another value takes."""
    section = PAGE.read_text().partition("## What needs a restart")[2].partition("\n## ")[0]
    found = {}
    for settings, effect in re.findall(r"^\| (`.*?) \| (.*?) \|$", section, re.MULTILINE):
        for setting in re.findall(r"`([^`]+)`", settings):
            assert setting not in found
            found[setting] = effect
    return found


def test_the_page_says_of_every_setting_what_is_decided() -> None:
    assert table() == {setting: effect.value for setting, effect in EFFECTS.items()}

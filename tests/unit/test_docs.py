"""The documentation: it builds, its links lead somewhere, and what it lists is what there is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from kvray.cli.app import app
from kvray.trace.reasons import COUNTED

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_ELSEWHERE = ("http://", "https://", "mailto:")


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_between_pages_lead_to_files(page: Path) -> None:
    targets = [link for link in _LINK.findall(page.read_text()) if not link.startswith(_ELSEWHERE)]
    assert [link for link in targets if not (page.parent / link).exists()] == []


def test_every_command_is_on_its_page() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert [name for name in commands if f"| `kvray {name}` |" not in page] == []


def test_every_reason_that_doctor_knows_is_in_the_faq() -> None:
    page = (ROOT / "docs" / "faq.md").read_text()
    assert [reason for reason in sorted(COUNTED) if f"| `{reason}` |" not in page] == []

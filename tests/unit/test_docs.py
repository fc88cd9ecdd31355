"""The documentation: it builds, its links lead somewhere, and what it lists is what there is."""

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.actors.tier.changes import EFFECTS, Effect
from kvray.trace.reasons import COUNTED
from tests.forks import run
from tests.unit.cli import commands_table

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_ELSEWHERE = ("http://", "https://", "mailto:")


def test_site_builds_without_a_warning(tmp_path):
    mkdocs = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path)
    done = run(*mkdocs, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    pages = {one["location"].partition("#")[0] for one in found if "helm" in one["text"].lower()}
    assert {"examples/helm/", "launch/"} <= pages
    assert (tmp_path / "CHANGELOG" / "index.html").exists()
    assert (tmp_path / "examples" / "helm" / "kvray" / "values.yaml").exists(), "a page leads there"
    assert "pre-wrap" in (tmp_path / "site.css").read_text()


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_between_pages_lead_to_files(page):
    targets = [link for link in _LINK.findall(page.read_text()) if not link.startswith(_ELSEWHERE)]
    assert [link for link in targets if not (page.parent / link).exists()] == []


def test_every_command_is_on_its_page_and_every_reason_that_doctor_knows_in_the_faq():
    page = commands_table.PAGE.read_text()
    assert page == commands_table.with_table(page), "run `python -m tests.unit.cli.commands_table`"
    page = (ROOT / "docs" / "faq.md").read_text()
    assert [reason for reason in sorted(COUNTED) if f"| `{reason}` |" not in page] == []


def test_sentences_that_the_page_on_failures_quotes_are_those_of_the_code():
    """A quotation has `...` for what differs from one time to the next."""
    page = (ROOT / "docs" / "failures.md").read_text()
    quoted = {one for one in re.findall(r"`([^`\n]+)`", page) if re.search(r"\w \.\.\.", one)}
    assert len(quoted) > 8
    said = [
        one
        for path in (ROOT / "kvray").rglob("*.py")
        for one in sentences(ast.parse(path.read_text()))
    ]
    for quotation in quoted:
        pieces = (re.escape(piece.strip()) for piece in quotation.split("..."))
        form = re.compile(r".*".join(pieces), re.DOTALL)
        assert any(form.match(one) for one in said), f"nothing says {quotation!r}"


def sentences(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a module, with `...` for what is put into them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (one.value if isinstance(one, ast.Constant) else "..." for one in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_page_says_of_every_setting_what_another_value_takes():
    page = (ROOT / "docs" / "launch.md").read_text()
    section = page.partition("## What needs a restart")[2].partition("\n## ")[0]
    found = {}
    for settings, effect in re.findall(r"^\| (`.*?) \| (.*?) \|$", section, re.MULTILINE):
        for setting in re.findall(r"`([^`]+)`", settings):
            assert setting not in found
            found[setting] = effect
    assert found == {setting: effect.value for setting, effect in EFFECTS.items()}
    assert f"\n| all others | {Effect.RESTART.value} |\n" in section

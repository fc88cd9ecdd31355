"""The package stays small enough to find one's way: no folder too full, no file too long."""

from pathlib import Path

import kvray

PACKAGE = Path(kvray.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_no_folder_has_more_than_25_modules() -> None:
    counts = {folder: sum(one.parent == folder for one in MODULES) for folder in _folders()}
    assert {str(folder): count for folder, count in counts.items() if count > 25} == {}


def test_no_module_has_more_than_600_lines() -> None:
    lengths = {one: one.read_text().count("\n") for one in MODULES}
    assert {str(one): length for one, length in lengths.items() if length > 600} == {}


def _folders() -> set[Path]:
    return {one.parent for one in MODULES}

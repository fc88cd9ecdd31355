"""The tables of docs/configuration.md; run as a program it writes them, and the chart's copies."""

import json
from itertools import groupby
from pathlib import Path

from kvray.config import SettingRow, json_schema, setting_rows
from tests import helm

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "configuration.md"
SCHEMA = DOCS / "kvray.schema.json"
BEGIN = "<!-- settings: written by tests/unit/config/settings_table.py -->\n"


def with_tables(page: str) -> str:
    return page[: page.index(BEGIN) + len(BEGIN)] + _tables()


def _tables() -> str:
    described = json.loads(json_schema())["properties"]
    text = ""
    for section, rows in groupby(setting_rows(), key=_section):
        if section:
            text += f"\n### {section}\n\n{described[section]['description']}\n"
        text += "\n| setting | a value is | without it | what it is |\n|---|---|---|---|\n"
        text += "".join(_line(row) for row in rows)
    return text


def _section(row: SettingRow) -> str:
    return row.name.rpartition(".")[0]


def _line(row: SettingRow) -> str:
    default = f"`{row.default}`" if row.default else ""
    return f"| `{row.name}` | {row.kind} | {default} | {row.description.replace('|', '/')} |\n"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    SCHEMA.write_text(json_schema(), encoding="utf-8")
    helm.write_copies()

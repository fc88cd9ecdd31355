"""The table of commands in docs/cli.md; run as a program it writes it from the commands."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from kvray.cli.app import app

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
BEGIN = "<!-- commands: written by tests/unit/cli/commands_table.py -->\n"
END = "\n## Completion\n"
_MORE = {
    "bench serve": "benchmarks.md#serving",
    "config show": "configuration.md",
    "dashboard serve": "page.md",
    "dashboard install": "metrics.md",
    "drain": "launch.md#nodes-that-go",
    "explain": "explain.md",
    "replay": "replay.md",
    "size": "sizing.md",
    "up": "launch.md",
}
"""The pages that say more."""


def with_table(page: str) -> str:
    head, _, rest = page.partition(BEGIN)
    lines = "".join(_line(*one) for one in commands(get_command(app)))
    return f"{head}{BEGIN}\n| command | does |\n|---|---|\n{lines}{END}{rest.partition(END)[2]}"


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names of all commands below one, each with what it names."""
    for below, one in getattr(command, "commands", {}).items():
        yield from commands(one, f"{name} {below}".strip())
    if not hasattr(command, "commands"):
        yield name, command


def _line(name: str, command: Any) -> str:
    says = " ".join(command.help.partition("\n\n")[0].split())
    more = f" [More]({_MORE[name]})." if name in _MORE else ""
    return f"| `kvray {name}` | {says}{more} |\n"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))

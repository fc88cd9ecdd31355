"""Commands in this process, and what commands print."""

from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from kvray.cli.app import app
from kvray.config import reading
from tests.forks import Done, RunKvray


@pytest.fixture
def call_kvray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunKvray:
    """Return what runs a command in this process, which costs milliseconds, in `tmp_path`."""
    monkeypatch.setattr(reading, "WELL_KNOWN_PATH", tmp_path / "etc" / "kvray.yaml")
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()

    def call(*args: str | Path, **environ: str) -> Done:
        told = [*map(str, args)]
        env = {"COLUMNS": "120", **environ}
        done = runner.invoke(app, told, env=env, prog_name="kvray", catch_exceptions=False)
        return Done(told, done.exit_code, done.stdout, done.stderr)

    return call


def shown(*parts: RenderableType, width: int = 200) -> str:
    """Return tables and sentences as a terminal of that width shows them."""
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
    return captured.get()


def rows(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]

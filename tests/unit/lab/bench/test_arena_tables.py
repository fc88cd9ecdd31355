"""`kvray bench tables`, as a user runs it: figures, and what it leaves behind."""

import json
import math
from pathlib import Path

from tests.forks import RunKvray


def test_small_run_gives_every_figure_and_leaves_nothing(
    run_kvray: RunKvray, tmp_path: Path
) -> None:
    config = tmp_path / "kvray.yaml"
    config.write_text(f"arena:\n  dir: {tmp_path}\n")
    done = run_kvray("bench", "tables", "--slots", "65536", "-c", str(config), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    for name in ("half", "full", "first_look", "look", "round", "stats"):
        median, p99 = found[f"tables_{name}_64k_ms"], found[f"tables_{name}_64k_ms_p99"]
        assert 0 < median <= p99 <= found[f"tables_{name}_64k_ms_max"] < math.inf
    for name in ("evict_01", "evict_5", "adopt"):
        assert found[f"tables_{name}_64k_ms"] > 0
    assert found["tables_bytes_64k"] > 16
    assert found["slots"] == [65_536]
    assert [path.name for path in tmp_path.iterdir()] == ["kvray.yaml"]

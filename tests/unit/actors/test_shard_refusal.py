from pathlib import Path

from kvray.actors.shard.shard import Shard
from kvray.errors import ConfigError
from tests.unit.actors.small_shard import Line, settings_for


def test_a_shard_whose_settings_cannot_be_used_says_so_and_makes_nothing(tmp_path: Path) -> None:
    crashes: list[str] = []
    shard = Shard(
        "refused", settings_for(tmp_path), [Line().announce], crashed=lambda: crashes.append("it")
    )
    shard.refuse(ConfigError("On this node: no."))
    status = shard.status()
    assert (status["state"], status["error"], status["message"]) == (
        *("failed", "ConfigError"),
        "On this node: no.",
    )
    shard.stop(retire=True, timeout_s=5)
    assert crashes == []
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []

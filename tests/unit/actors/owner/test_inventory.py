import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.actors.owner.inventory import find_arenas, look_at
from kvray.errors import ConfigError
from tests.unit.actors.shard_process import ROOT
from tests.unit.actors.small_shard import wait_until_serving

SWEEPER = """
import sys
from pathlib import Path
from kvray.actors.owner.inventory import find_arenas, remove_unused
print("started", flush=True)
while True:
    for finding in find_arenas(Path(sys.argv[1])):
        if finding.use == "unused":
            remove_unused(finding.path)
"""


@pytest.fixture
def sweeper(directory: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that removes whatever nobody uses, without a pause."""
    process = subprocess.Popen(
        [sys.executable, "-c", SWEEPER, str(directory.parent)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    yield process
    process.kill()
    process.communicate()


def test_shards_start_and_serve_while_everything_unused_is_removed(sweeper, make_shard, directory):
    for n in range(20):
        shard = make_shard()
        wait_until_serving(shard)
        assert look_at(directory).use == "owned"
        shard.stop(retire=n % 2 == 0, timeout_s=10)
    assert sweeper.poll() is None, "it has met an error"


def test_looking_makes_nothing(directory):
    assert look_at(directory).use == "unused"
    assert not directory.exists()


def test_arenas_of_a_file_cannot_be_listed(directory):
    directory.touch()
    with pytest.raises(ConfigError, match="no directory that can be listed"):
        find_arenas(directory)

"""The demo on the tiny model: what it shows, and what it leaves when it is cut short."""

import json
import signal
from collections.abc import Callable, Iterator

import pytest

from kvray.lab.demo.play import shareable_tokens
from tests.ray.command_line import SHM, Shell, open_shell

pytestmark = pytest.mark.ray


@pytest.fixture
def shell() -> Iterator[Shell]:
    with open_shell("demo") as shell:
        # Neither a setting of the user's nor a tier of his name gets into the demo.
        shell.environ["KVRAY_ARENA__LOCK_WAIT_S"] = "nonsense"
        yield shell


def left_memory(shell: Shell) -> list[str]:
    """Return what is left of the memory of the demo that ran last, and of no other's."""
    return [path.name for path in SHM.glob(f"kvray-demo-{shell.pid}*")]


@pytest.mark.long
def test_demo_shares_prefixes_and_changes_no_token(shell: Shell) -> None:
    done = shell.run("demo", "--model", "tiny", "--json", "--plot", "demo.png")
    assert done.returncode == 0, done.stdout + done.stderr
    picture = shell.directory / "demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    found = json.loads(done.stdout)
    assert found["identical_text"] is True
    assert found["wrong_tokens"] == 0
    assert found["ttft_ratio"] > 0
    assert found["phase_c"]["without_kvray_reused_tokens"] == 0
    assert found["phase_c"]["with_kvray_reused_tokens"] > 0
    fields = {"phase", "replica", "prompt_tokens", "hit_tokens", "ttft_s", "text"}
    assert all(fields <= request.keys() for request in found["requests"])
    shared = [one for one in found["requests"] if one["phase"] in "ad" and one["hit_tokens"]]
    assert [one["phase"] for one in shared] == ["a", "a", "d", "d"]
    for one in shared:
        assert one["hit_tokens"] == shareable_tokens(one["prompt_tokens"])
    assert {one["prompt_tokens"] % 32 == 0 for one in shared} == {True, False}
    assert shell.leftovers() == []
    assert left_memory(shell) == []


def ray_begins(shell: Shell) -> bool:
    return any(shell.directory.glob("kvray-*/ray-start.log"))


def engines_run(shell: Shell) -> bool:
    return sum("kvray.reference.replica_child" in one for one in shell.commands()) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("moment", "signum"), [(ray_begins, signal.SIGTERM), (engines_run, signal.SIGINT)]
)
def test_interrupted_demo_leaves_nothing(
    shell: Shell, moment: Callable[[Shell], bool], signum: signal.Signals
) -> None:
    done = shell.interrupt(
        "demo", "--model", "tiny", "--json", when=lambda: moment(shell), signum=signum
    )
    assert done.returncode == 130, done.stderr
    assert done.stdout == ""
    assert shell.leftovers() == []
    assert left_memory(shell) == []

"""Runs `ray up` for one machine over ssh, in namespaces that end with it: see `test_programs`.

Run as root, as `unshare --net --pid --fork --kill-child --mount --mount-proc python -m
tests.kit.ray.on_premise`: then nothing of it can reach, or outlive, anything else. Writes what it
found to standard output as JSON.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "ray_cluster"
OWN = Path("/media")
"""Where a file system of this run's own is mounted."""
HOME = OWN / "home"
HEAD = "10.0.0.1"
"""What the example calls its head."""
SSHD = """\
ListenAddress 127.0.0.1
Port 22
HostKey {own}/host_key
AuthorizedKeysFile {own}/key.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
"""
LIMIT_S = 240
"""For each command; a machine that is busy takes ten times as long as one that is not."""
KVRAY = "PATH=~/kvray-env/bin:$PATH RAY_AUTH_MODE=token kvray"
TIER = "-c ~/kvray-launch/etc/kvray.yaml --address 127.0.0.1:6379"


def main() -> None:
    seal()
    config = write_cluster()
    found: dict[str, Any] = {}
    with sshd():
        ray("up", config, "-y", "--no-config-cache")
        found["first"] = status(config)
        ray("up", config, "-y", "--no-config-cache")
        found["second"] = status(config)
        ray("exec", config, f"{KVRAY} down {TIER}")
        found["arenas"] = [path.name for path in Path("/dev/shm").glob("kvray-*")]
        ray("exec", config, "~/kvray-launch/ray-node stop")
        found["rays"] = rays()
    json.dump(found, sys.stdout)


def seal() -> None:
    """Give this run file systems, a loopback device and a home directory of its own."""
    cover(OWN)
    kept = [path for path in (ROOT, Path(sys.prefix)) if path.is_relative_to("/tmp")]
    for number, path in enumerate(kept):
        (OWN / f"kept{number}").mkdir()
        run("mount", "--bind", str(path), str(OWN / f"kept{number}"))
    for path in (Path("/tmp"), Path("/run"), Path("/dev/shm")):
        cover(path)
    for number, path in enumerate(kept):  # a checkout may lie in /tmp
        path.mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", str(OWN / f"kept{number}"), str(path))
    run("ip", "link", "set", "lo", "up")
    HOME.mkdir(mode=0o700)
    Path("/run/sshd").mkdir(mode=0o755)
    (OWN / "passwd").write_text(
        f"root:x:0:0:root:{HOME}:/bin/bash\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"
    )
    (OWN / "shadow").write_text("root:*:19000:0:99999:7:::\nsshd:!:19000::::::\n")
    for name in ("passwd", "shadow"):
        run("mount", "--bind", str(OWN / name), f"/etc/{name}")
    for name in ("key", "host_key"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(OWN / name))


def cover(path: Path) -> None:
    """Mount an empty file system of this run's own at `path`."""
    mount = ["mount", "-t", "tmpfs", "-o", "mode=1777", "kvray", str(path)]
    subprocess.run(mount, check=True, stdin=subprocess.DEVNULL)  # there is no place for a log yet


def write_cluster() -> Path:
    """Write the example with this machine in place of the example's, and nothing to download."""
    shutil.copytree(EXAMPLE, OWN / "example")
    tier = OWN / "example" / "etc" / "kvray.yaml"
    values = yaml.safe_load(tier.read_text())
    values["arena"]["capacity"] = "64MiB"
    tier.write_text(yaml.safe_dump(values))
    (OWN / "auth_token").write_text("5" * 64)
    (HOME / "kvray-env").symlink_to(sys.prefix)
    text = (EXAMPLE / "cluster-local.yaml").read_text().replace(HEAD, "127.0.0.1")
    text = text.replace(
        "--dashboard-port=8265", "--include-dashboard=false"
    )  # it is many processes
    cluster = yaml.safe_load(text)
    cluster["provider"]["worker_ips"] = []
    cluster["auth"] = {"ssh_user": "root", "ssh_private_key": str(OWN / "key")}
    cluster["file_mounts"] = {
        "~/kvray-launch": str(OWN / "example"),
        "~/.ray/auth_token": str(OWN / "auth_token"),
    }
    cluster["setup_commands"] = [
        command for command in cluster["setup_commands"] if "kvray-env" not in command
    ]
    path = OWN / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    return path


@contextlib.contextmanager
def sshd() -> Iterator[None]:
    config = OWN / "sshd_config"
    config.write_text(SSHD.format(own=OWN))
    process = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", str(config)])
    try:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", 22), timeout=1).close()
                break
            assert time.monotonic() < deadline, "no sshd"
            assert process.poll() is None, "no sshd"
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


def ray(command: str, config: Path, *args: str) -> str:
    environ = {
        "HOME": str(HOME),
        "PATH": os.environ["PATH"],
        "RAY_USAGE_STATS_ENABLED": "0",
        "TERM": "dumb",
    }
    return run(
        sys.executable, "-m", "ray.scripts.scripts", command, str(config), *args, env=environ
    )


def status(config: Path) -> dict[str, Any]:
    """Return what `kvray status` says of the only shard, asked as a user would."""
    said = ray("exec", config, f"{KVRAY} status --json {TIER}")
    found = json.loads(said[said.index("{") : said.rindex("}") + 1])
    (shard,) = found["shards"]
    return {"state": shard["state"], **{key: shard["arena"][key] for key in ARENA}}


ARENA = ("arena_id", "shard_epoch", "capacity_bytes")


def rays() -> list[str]:
    """Return the processes of Ray that are left."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if "/.ray-node/" in command or command.startswith("ray::"):
                found.append(command)
    return found


def run(*command: str, **options: Any) -> str:
    """Run a command and return what it wrote; if it fails or hangs, end with that."""
    log = OWN / "log"
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
                **options,
            )
            status = f"ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            status = f"did not end within {LIMIT_S} s"
    said = log.read_text(errors="replace")
    if status != "ended with 0":
        sys.exit(f"{' '.join(command)} {status}: {said[-4000:]}")
    return said


if __name__ == "__main__":
    main()

"""Make .venv and install kvray into it, unless the one that is there already has all of it.

Run by the Makefile with any Python: old ones must get as far as the sentence that they are too old,
so this file uses no syntax newer than Python 2.7.
"""

import sys

if sys.version_info < (3, 10):
    sys.exit(
        "kvray needs Python 3.10 or newer, and {} is {}.{}. "
        "Name another one: make PYTHON=python3.12 ...".format(sys.executable, *sys.version_info[:2])
    )

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, ".kvray-installed")
BEGUN = os.path.join(VENV, ".kvray-begun")


def main():
    """Bring .venv up to date; a second run reads two files and touches no network."""
    with open(os.path.join(ROOT, ".ci", ".lock"), "w") as lock:
        take(lock)
        wanted = fingerprint()
        if read(STAMP) == wanted and runs("import kvray"):
            return
        if is_to_be_cleared():
            create()
        install()
        with open(STAMP, "w") as stamp:
            stamp.write(wanted)
        os.remove(BEGUN)


def take(lock):
    """Wait until no other make command is at work on .venv."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("Waiting for another make command that is making .venv")
        fcntl.flock(lock, fcntl.LOCK_EX)


def fingerprint():
    """Return what the installation depends on; contents, because git changes times."""
    # The path is in it because a moved checkout leaves scripts that name the old place.
    told = [ROOT, "{}.{}".format(*sys.version_info[:2])]
    told += [read(os.path.join(ROOT, name)) for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(repr(told).encode()).hexdigest()


def is_to_be_cleared():
    """Return whether .venv is missing, half made, or made by another Python."""
    version = "import pip, sys; assert sys.version_info[:2] == {!r}".format(sys.version_info[:2])
    return os.path.exists(BEGUN) or not runs(version)


def create():
    """Make an empty environment in place of whatever is there."""
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            sys.exit(
                "{} has no module {}, which makes virtual environments. Install it (on Debian and "
                "Ubuntu: apt-get install python3-venv), then run make again.".format(
                    sys.executable, module
                )
            )
    say("Making .venv with {}".format(sys.executable))
    if os.path.islink(VENV) or os.path.isfile(VENV):
        os.remove(VENV)
    shutil.rmtree(VENV, ignore_errors=True)
    os.makedirs(VENV)
    mark_begun()
    run([sys.executable, "-m", "venv", VENV])


def install():
    """Install what constraints.txt pins, then kvray itself from this checkout."""
    mark_begun()
    say("Installing kvray and its tools into .venv (minutes the first time)")
    # Errors alone: what pip warns of concerns indexes and caches, and its bars hide our own line.
    pip = [PYTHON, "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check"]
    # Python compiles what it imports; to compile all of torch and Ray takes half of pip's time.
    pip += ["--no-compile"]
    pip += ["--constraint", os.path.join(ROOT, "constraints.txt")]
    # The build tool comes first and from the pins, so that nothing is fetched behind our back; so
    # does a pip that knows dependency groups, which Debian's does not.
    try:
        run(pip + ["hatchling", "pip>=25.1"])
        extras = ".[bench,dashboard,demo,otlp,serve]"
        run(pip + ["--no-build-isolation", "--group", "dev", "--editable", extras])
    except SystemExit:  # pip refused before it touched anything: what was there still works
        os.remove(BEGUN)
        raise


def mark_begun():
    """Leave a sign for the next run that this one did not finish."""
    open(BEGUN, "w").close()


def run(command):
    """Run `command` in the root of the checkout, show the time, and end if it fails."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment())
    is_terminal = sys.stdout.isatty()
    began = shown = time.time()
    try:
        while process.poll() is None:
            time.sleep(0.05)
            if time.time() - shown >= (1 if is_terminal else 30):
                shown = time.time()
                elapsed = "  {:.0f} s".format(shown - began)
                show("\r" + elapsed if is_terminal else elapsed + "\n")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        if is_terminal:
            show("\r{:12}\r".format(""))
    if process.returncode:
        told = " ".join(map(repr, command))
        sys.exit("This command failed (status {}): {}".format(process.returncode, told))


def runs(code):
    """Return whether .venv has a Python that runs `code`."""
    command = [PYTHON, "-I", "-c", code]
    try:
        return subprocess.call(command, cwd="/", stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def environment():
    """Return the environment without settings that lead pip out of .venv."""
    kept = {name: value for name, value in os.environ.items() if name != "PIP_TARGET"}
    return dict(kept, PIP_USER="0", PYTHONNOUSERSITE="1")


def read(path):
    """Return the text of a file; a missing one is empty."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def say(text):
    """Print one line of progress."""
    show(text + "\n")


def show(text):
    """Print text, a part of a line perhaps, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)

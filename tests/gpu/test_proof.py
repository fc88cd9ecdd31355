"""The command behind `make gpu`, on the CPU."""

import json
import os
import signal
import sys

import pytest
import torch

from tests.forks import run
from tests.gpu import proof


@pytest.mark.skipif(torch.cuda.is_available(), reason="the command itself runs this there")
def test_it_leaves_all_figures_in_one_file(tmp_path):
    command = (sys.executable, proof.__file__, "--cpu", "--out", tmp_path)
    done = run(*command, "--only", "copies", "--only", "prompts")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Failed: nothing" in done.stdout
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["copies"]["has_passed"]
    assert found["copies"]["figures"]["targets"]["gpu_d2h_ratio_4mib"]["wanted"] == 0.95
    assert found["prompts"]["figures"]["wrong_answers"] == 0
    text = (tmp_path / "gpu.txt").read_text()
    assert "== copies, at most" in text
    assert "first token of 1,024 tokens, loaded or computed" in text


def test_a_process_that_outlives_its_step_is_not_waited_for(tmp_path, monkeypatch):
    code = "import subprocess;print(subprocess.Popen(['sleep', '300'], start_new_session=True).pid)"
    monkeypatch.setattr(proof, "STEPS", {"leaves": (60, ("-c", code))})
    monkeypatch.setattr(proof, "_LAST_S", 0.5)
    assert proof.run("leaves", tmp_path, "", is_cpu=True)["has_passed"]
    pid = int((tmp_path / "gpu.txt").read_text().split()[-1])
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "status"),
    [("import time; time.sleep(60)", "not done after 1 s"), ("raise SystemExit(3)", 3)],
    ids=["hangs", "fails"],
)
def test_a_step_that_hangs_or_fails_does_not_stop_the_others(tmp_path, monkeypatch, code, status):
    steps = {"bad": (1, ("-c", code)), "good": (60, ("-c", "print('fine')"))}
    monkeypatch.setattr(proof, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["proof", "--out", str(tmp_path)])
    assert proof.main() == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert (found["bad"]["has_passed"], found["bad"]["status"]) == (False, status)
    assert found["good"]["has_passed"]
    assert "fine" in (tmp_path / "gpu.txt").read_text()


def test_the_deadlines_fit_into_ten_minutes():
    assert sum(seconds for seconds, _ in proof.STEPS.values()) <= 590

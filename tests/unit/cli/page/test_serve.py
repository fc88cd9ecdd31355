"""`kvray dashboard serve` as a user starts and ends it, and who may read the page."""

import signal
import socket
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from fastapi.testclient import TestClient

from kvray.cli.page.command import _announce, _listening
from kvray.cli.page.server import Gate, make_app
from kvray.cli.page.state import STATUS, PageState
from kvray.config import load_config
from kvray.console import output
from tests.forks import assert_refused, running_kvray
from tests.unit.cli.answers import NOW, status
from tests.waiting import HANG_S


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_page_is_served_until_a_signal_and_leaves_no_process(tmp_path, signum):
    command = ("dashboard", "serve", "--port", "0")
    with running_kvray(*command, TMPDIR=str(tmp_path)) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("The page is at http://"), process.stderr
        with urllib.request.urlopen(said.split()[4], timeout=HANG_S) as answer:
            assert b"<title>kvray</title>" in answer.read()
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=HANG_S)
    assert (process.returncode, stderr) == (0, "")
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_port_in_use_and_a_missing_package_are_one_sentence(call_kvray, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = call_kvray("dashboard", "serve", "--port", str(other.getsockname()[1]))
    assert_refused(done, "Address already in use", "--port")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert_refused(call_kvray("dashboard", "serve"), "pip install 'kvray[dashboard]'")
    monkeypatch.setattr(output, "find_spec", lambda name: None)
    done = call_kvray("bench", "serve", "--local", "--plot", "x.png")
    assert_refused(done, "--plot needs matplotlib; run `pip install 'kvray[bench]'`.")


def test_an_address_that_others_reach_is_warned_of_and_one_of_ipv6_is_in_brackets(capsys):
    for has_token, who in ((False, "whoever"), (True, "whoever has the token")):
        _announce("0.0.0.0", "0.0.0.0", 8270, has_token=has_token)
        assert capsys.readouterr().err.startswith(f"kvray: {who}")
    for host in ("::1", "[::1]"):
        _announce(host, "::1", 8270, has_token=False)
        assert capsys.readouterr().out == "The page is at http://[::1]:8270/ until Ctrl-C.\n"


@pytest.mark.parametrize(
    ("host", "others"),
    [
        ("::1", ["::1"]),
        ("[::1]", ["::1"]),
        ("::", ["::1", "127.0.0.1"]),
        ("127.0.0.1", ["127.0.0.1"]),
    ],
)
def test_it_listens_at_addresses_of_both_kinds(host, others):
    with _listening(host, 0) as listener:
        for other in others:
            socket.create_connection((other, listener.getsockname()[1])).close()


TOKEN = "a token of this very test"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


def browse(token_file: Path | None = None, *, base_url: str = "http://localhost") -> TestClient:
    """Return a browser before the page of a tier, with a token if there is a file for it."""
    path = None if token_file is None else str(token_file)
    config = load_config(overrides={"security.auth_token_file": path}, environ={})
    page_state = PageState("prod")
    page_state.take({"part": STATUS, "answer": status()}, NOW)
    gate = Gate(config, names=["localhost", "tier.example"], port=8270)
    return TestClient(make_app(page_state, gate, lambda number: None), base_url=base_url)


def test_page_and_its_files_come_from_here_and_load_nothing_else():
    browser = browse()
    page = browser.get("/")
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    assert "https://" not in page.text
    names = [part.split('"')[0] for part in page.text.split('"static/')[1:]]
    assert {"uPlot.iife.min.js", "page.js", "page.css"} <= set(names)
    for name in names:
        answer = browser.get(f"/static/{name}")
        assert (answer.status_code, answer.headers["x-content-type-options"]) == (200, "nosniff")


def test_server_only_reads_and_nothing_else_is_there():
    for path in ("/", "/state", "/static/page.js"):
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            assert browse().request(method, path).status_code == 405, (method, path)
    for path in ("/docs", "/openapi.json", "/static/../page_state.py", "/static/..%2fboard.py"):
        assert browse().get(path).status_code == 404, path


def test_page_of_another_name_that_points_here_reads_nothing_and_own_names_are_known():
    for host in ("evil.example", "localhost.evil.example", "", "[::1", "127.0.0.1.nip.io"):
        for path in ("/", "/state"):
            answer = browse().get(path, headers={"host": host})
            assert answer.status_code == 421, host
            assert "by its address" in answer.json()["says"]
    names = ("localhost", "localhost:8270", "127.0.0.1:9", "[::1]:8270", "10.1.2.3", "Tier.Example")
    for host in names:
        answer = browse().get("/state", headers={"host": host})
        assert (answer.status_code, "set-cookie" in answer.headers) == (200, False), host


def test_without_the_token_nothing_of_the_tier_is_told_and_with_it_there_is_a_cookie(token_file):
    browser = browse(token_file)
    answer = browser.get("/state")
    assert (answer.status_code, set(answer.json())) == (401, {"says"})
    assert not browser.cookies
    wrong = {"Authorization": "Bearer another token, or so"}
    assert browser.get("/state", headers=wrong).status_code == 401
    assert browser.get("/state?token=wrong").status_code == 401
    assert browser.get("/", headers=wrong).status_code == 200  # the form is no secret
    answer = browser.get("/state", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.json()["nodes"]
    given = answer.headers["set-cookie"]
    assert "HttpOnly" in given
    assert "SameSite=strict" in given
    assert TOKEN not in given
    assert browser.get("/state").status_code == 200


def test_token_in_the_address_is_taken_out_of_it_and_a_new_one_holds_at_once(token_file):
    wrong = browse(token_file).get("/?token=wrong", follow_redirects=False)
    assert (wrong.status_code, "set-cookie" in wrong.headers) == (200, False)
    browser = browse(token_file)
    answer = browser.get("/", params={"token": TOKEN}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "./")
    assert browser.get("/state").status_code == 200
    token_file.write_text("quite another token")
    assert browser.get("/state").status_code == 401
    token_file.chmod(0o644)
    answer = browser.get("/state")
    assert (answer.status_code, "chmod 600" in answer.json()["says"]) == (503, True)

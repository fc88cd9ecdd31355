"""What the endpoint answers when it fails itself."""

import pytest

pytest.importorskip("ray.serve")


def test_a_defect_is_told_in_openais_form() -> None:
    from fastapi.testclient import TestClient

    from kvray.serve.ingress import app

    # Outside a replica of Serve a path has nobody who could answer it.
    answer = TestClient(app, raise_server_exceptions=False).get("/v1/models")
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["type"] == "server_error"
    assert "RayServeException" in error["message"]

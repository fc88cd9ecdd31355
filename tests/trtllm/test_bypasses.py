"""Requests whose keys and values depend on more than can be told pass the cache by."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trtllm.conftest import MakeEngine
from tests.trtllm.engine import Engine
from tests.trtllm.version import Version

PROMPT = list(range(100, 140))
UNTOLD: dict[str, dict[str, Any]] = {
    "media_without_digests": {"multimodal_embedding": object(), "multimodal_positions": [3]},
    "media_beside_the_request": {"py_multimodal_data": {"image": object()}},
    "prompt_embeddings": {"prompt_embedding_table": object(), "prompt_vocab_size": 8},
    "an_adapter_without_a_path": {"lora_task_id": 3},
    "positions_of_its_own": {"position_ids": [1, 2]},
    "an_encoder": {"encoder_tokens": [1, 2]},
}


@pytest.mark.parametrize("fields", UNTOLD.values(), ids=UNTOLD)
def test_what_cannot_be_told_is_neither_saved_nor_loaded(
    make_engine: MakeEngine, fields: dict[str, Any]
) -> None:
    engine = make_engine()
    engine.serve(PROMPT, max_new=9, **fields)
    engine.close()
    warm = make_engine()
    assert warm.serve(PROMPT, **fields).num_hit == 0
    assert engine.totals["stored_blocks"] == warm.totals["loaded_blocks"] == 0
    assert warm.totals["bypassed_requests"] == 1


def test_media_with_digests_are_shared_by_their_digests(make_engine: MakeEngine) -> None:
    cold = make_engine()
    cold.serve(PROMPT, **picture(1))
    cold.close()
    assert make_engine().serve(PROMPT, **picture(1)).num_hit == 36


def test_what_follows_other_media_is_not_shared(make_engine: MakeEngine) -> None:
    cold = make_engine()
    cold.serve(PROMPT, **picture(1))
    cold.close()
    # The picture begins at token 6: one block lies before it.
    assert make_engine().serve(PROMPT, **picture(2)).num_hit == 4


def test_adapters_are_told_apart_by_what_is_in_them(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    paths = [adapter(tmp_path, name) for name in ("a", "b", "same_as_a")]
    (paths[2] / "adapter_model.safetensors").write_bytes(
        (paths[0] / "adapter_model.safetensors").read_bytes()
    )
    cold = make_engine()
    serve_settled(cold, lora_task_id=1, py_lora_path=str(paths[0]))
    cold.close()
    hits = [serve_settled(make_engine(), lora_task_id=9, py_lora_path=str(path)) for path in paths]
    assert hits == [36, 0, 36]


def test_requests_that_only_generate_are_not_asked_about(
    make_engine: MakeEngine, version: Version
) -> None:
    engine = make_engine()
    request = engine.submit(PROMPT, is_generation_only_request=True)
    if not version.stand_in.HAS_GROUPS:  # the engine itself refuses them
        with pytest.raises(RuntimeError):
            engine.run()
        engine.kill(request)
        engine.failure = None
    engine.run()
    assert engine.totals["requests"] == engine.totals["stored_blocks"] == 0


def picture(digest: int) -> dict[str, Any]:
    return {
        "multimodal_hashes": [[digest] * 8],
        "multimodal_positions": [6],
        "multimodal_lengths": [10],
    }


def adapter(directory: Path, name: str) -> Path:
    path = directory / name
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (path / "adapter_model.safetensors").write_bytes(name.encode() * 100)
    return path


def serve_settled(engine: Engine, **fields: Any) -> int:
    """Serve until the adapter has been read, which the first request may not wait for."""
    for _ in range(20):
        bypassed = engine.totals["bypassed_requests"]
        hit = engine.serve(PROMPT, **fields).num_hit
        if engine.totals["bypassed_requests"] == bypassed:
            return hit
    raise AssertionError("the adapter is not read")

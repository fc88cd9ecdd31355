"""Requests whose keys and values depend on more than can be told pass the cache by."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvray.engine import model_name
from kvray.errors import ConfigError
from tests.trtllm.conftest import PROMPT
from tests.trtllm.engine import Engine
from tests.trtllm.llm_request import PLACEHOLDERS
from tests.trtllm.version import WITH_GROUPS, Version, on

READ_S = 30.0
SEEN = [*PROMPT[:6], *PLACEHOLDERS, *PROMPT[16:]]
"""A prompt with a picture at token 6; one block lies before it."""
UNTOLD: dict[str, dict[str, Any]] = {
    "media_without_digests": {"multimodal_embedding": object(), "multimodal_positions": [3]},
    "prompt_embeddings": {"prompt_embedding_table": object(), "prompt_vocab_size": 8},
    "an_adapter_without_a_path": {"lora_task_id": 3},
    "positions_of_its_own": {"position_ids": [1, 2]},
}
UNBOUND: dict[str, dict[str, Any]] = {
    "media_beside_the_request": {"py_multimodal_data": {"image": object()}},
    "an_encoder": {"encoder_tokens": [1, 2]},
}
"""Attributes that a copy of a request lacks, at least in some version."""
LLAVA = {"vocab_size": 32_064, "image_token_index": PLACEHOLDERS[0], "vision_config": {"depth": 2}}


@pytest.fixture(params=["first_manager", "second_manager"])
def is_flat(request: pytest.FixtureRequest, version: Version) -> bool:
    """Whether the first cache manager is in use, which asks with copies."""
    if request.param == "second_manager" and not version.has_groups:
        pytest.skip("this version has one cache manager")
    return bool(request.param == "first_manager")


@pytest.mark.parametrize("fields", (UNTOLD | UNBOUND).values(), ids=UNTOLD | UNBOUND)
def test_what_cannot_be_told_is_neither_saved_nor_loaded(
    make_engine, version, fields, is_flat, caplog
):
    if not set(fields) <= set(version.request_fields):
        pytest.skip("this version's requests have no such attribute")
    for engine in (make_engine(is_flat=is_flat), make_engine(is_flat=is_flat)):
        assert engine.serve(PROMPT, max_new=9, **fields).num_hit == 0
        engine.close()
        assert engine.totals["stored_blocks"] == engine.totals["loaded_blocks"] == 0
    if fields in UNTOLD.values() or not is_flat:
        assert engine.totals["bypassed_requests"] == 1
        assert "a request goes without the tier: " in caplog.text


def test_media_that_a_copy_does_not_show_are_told_by_the_tokens_they_stand_for(make_engine, llava):
    cold = make_engine(is_flat=True, model=llava)
    for fields in ({}, seen(1)):
        cold.serve(SEEN, **fields)
    cold.serve(PROMPT)
    cold.close()
    assert cold.totals["bypassed_requests"] == 2
    warm = make_engine(is_flat=True, model=llava)
    assert warm.serve(PROMPT).num_hit == 36
    assert warm.serve(SEEN, **seen(2)).num_hit == 0


@on(*WITH_GROUPS)
def test_text_is_told_by_the_request_itself_where_the_engine_asks_with_it(
    make_engine, stored, llava
):
    stored(SEEN, model=llava)
    assert make_engine(model=llava).serve(SEEN).num_hit == 36


@pytest.mark.parametrize("is_new", [False, True], ids=["turned", "new"])
def test_a_promise_that_ends_before_what_was_not_shown_is_kept(make_engine, stored, is_new):
    stored(SEEN[:6], max_new=1, is_flat=True)
    data = {"py_multimodal_data": {"taste": 1}} if is_new else turned(3)
    warm = make_engine(is_flat=True)
    assert warm.serve(SEEN, **picture(1), **data).num_hit == 4
    warm.serve(PROMPT)
    assert warm.totals["bypassed_requests"] == 0


def test_a_promise_is_not_kept_to_a_request_that_turns_out_to_have_more_than_text(
    make_engine, stored
):
    stored(SEEN, is_flat=True)
    warm = make_engine(is_flat=True)
    warm.submit(SEEN, **seen(1))
    with pytest.raises(ConfigError, match="more than text"):
        warm.run()
    assert warm.totals["loaded_blocks"] == 0


def test_an_engine_that_hides_media_is_promised_nothing_from_then_on(make_engine, stored):
    stored(SEEN, is_flat=True)
    warm = make_engine(is_flat=True)
    warm.serve([7, *SEEN], **seen(1))
    assert warm.serve(SEEN, **seen(2)).num_hit == warm.serve(SEEN).num_hit == 0


def test_pictures_of_one_digest_whose_keys_are_turned_unlike_are_not_shared(
    make_engine, stored, is_flat
):
    stored(SEEN, fields=picture(1) | turned(3), is_flat=is_flat)
    warm = make_engine(is_flat=is_flat)
    assert warm.serve(SEEN, **picture(1), **turned(4)).num_hit == (0 if is_flat else 4)


@pytest.mark.parametrize(("digest", "hit"), [(1, 36), (2, 4)], ids=["same", "other"])
def test_media_with_digests_are_shared_by_their_digests(make_engine, stored, is_flat, digest, hit):
    """The picture begins at token 6: one block lies before it."""
    stored(fields=picture(1), is_flat=is_flat)
    assert make_engine(is_flat=is_flat).serve(PROMPT, **picture(digest)).num_hit == hit


@pytest.mark.parametrize("media", [True, False], ids=["media", "text"])
def test_what_the_input_processor_says_again_beside_a_prompt_is_no_reason_to_bypass(
    make_engine, stored, is_flat, media
):
    """As with Mistral's vision models in 1.2, and with all of them on main."""
    text = {"mm_bidirectional_blocks": False, "multimodal_embed_mask_cumsum": torch.arange(9)}
    said = {"multimodal_embedding_lengths": [10], "special_token_offsets": [9], **text}
    data = {"image": 1, **said} if media else {"mrope_config": {}, **text}
    fields = {"py_multimodal_data": data} | (picture(1) if media else {})
    stored(SEEN, fields=fields, is_flat=is_flat)
    assert make_engine(is_flat=is_flat).serve(SEEN, **fields).num_hit == 36


def test_adapters_are_not_served_where_no_path_of_theirs_is_bound(make_engine, tmp_path, caplog):
    fields = {"lora_task_id": 1, "py_lora_path": str(adapter(tmp_path, "a"))}
    for engine in (make_engine(is_flat=True), make_engine(is_flat=True)):
        assert engine.serve(PROMPT, **fields).num_hit == 0
        engine.close()
        assert engine.totals["stored_blocks"] == 0
    assert engine.totals["bypassed_requests"] == 1
    assert caplog.text.count("LoRA adapter, whose path the first cache manager") == 2, "once each"


@on(*WITH_GROUPS)
def test_adapters_are_told_apart_by_what_is_in_them(make_engine, tmp_path):
    paths = [adapter(tmp_path, name) for name in ("a", "b", "same_as_a")]
    (paths[2] / "adapter_model.safetensors").write_bytes(
        (paths[0] / "adapter_model.safetensors").read_bytes()
    )
    cold = make_engine()
    serve_settled(cold, lora_task_id=1, py_lora_path=str(paths[0]))
    cold.close()
    hits = [serve_settled(make_engine(), lora_task_id=9, py_lora_path=str(path)) for path in paths]
    assert hits == [36, 0, 36]


def test_requests_that_only_generate_are_not_asked_about(make_engine, version):
    engine = make_engine()
    request = engine.submit(PROMPT, is_generation_only_request=True)
    if not version.has_groups:  # the engine itself refuses them
        with pytest.raises(RuntimeError):
            engine.run()
        engine.kill(request)
        engine.failure = None
    engine.run()
    assert engine.totals["requests"] == engine.totals["stored_blocks"] == 0


@pytest.fixture
def llava(tmp_path: Path) -> str:
    """Return the path of a checkpoint that says which tokens stand for pictures."""
    (tmp_path / "config.json").write_text(json.dumps(LLAVA))
    return str(tmp_path)


def picture(digest: int) -> dict[str, Any]:
    return {
        "multimodal_hashes": [[digest] * 8],
        "multimodal_positions": [6],
        "multimodal_lengths": [10],
    }


def seen(digest: int) -> dict[str, Any]:
    """Return a picture for which the input processor made no digest."""
    return {"py_multimodal_data": {"image": digest}}


def turned(number: int) -> dict[str, Any]:
    """Return how keys are turned at a picture, as it has `number` rows."""
    positions = torch.arange(3 * len(SEEN)).reshape(3, 1, -1) * number
    return {"py_multimodal_data": {"image": 1, "mrope_config": {"mrope_position_ids": positions}}}


def adapter(directory: Path, name: str) -> Path:
    path = directory / name
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (path / "adapter_model.safetensors").write_bytes(name.encode() * 100)
    return path


def serve_settled(engine: Engine, **fields: Any) -> int:
    """Serve a request that waits until its adapter has been read, however long that takes."""
    with patch.object(model_name, "_WAIT_S", READ_S):
        return engine.serve(PROMPT, **fields).num_hit

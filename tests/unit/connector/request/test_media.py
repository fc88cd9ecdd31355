"""Which images are one: not those alone whose digests and tokens are equal."""

from typing import Any

import torch

from kvray.connector.request.media import media_items

WIDE = torch.tensor([[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5]])
"""Positions of a prompt with an image of 2 x 3 patches at tokens 2 to 7, as its keys are turned."""
TALL = torch.tensor([[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 3, 3, 4, 4, 5]])


def digest_of(positions: Any, *, length: int | None = 6) -> bytes:
    fields: dict[str, Any] = {
        "multimodal_hashes": [[7] * 8],
        "multimodal_positions": [2],
        "py_multimodal_data": {"image": {}, "mrope_config": {"mrope_position_ids": positions}},
    }
    if length is not None:
        fields["multimodal_lengths"] = [length]
    found = media_items(fields, prompt_len=9)
    assert found is not None
    return found[0].digest


def test_equal_pixels_in_another_shape_are_another_image() -> None:
    assert digest_of(WIDE) == digest_of(WIDE.clone()) == digest_of(WIDE[:, None].squeeze(1))
    assert digest_of(WIDE) != digest_of(TALL)


def test_what_follows_an_image_in_the_prompt_is_not_part_of_it() -> None:
    longer = torch.cat([WIDE, torch.tensor([[6, 7], [6, 7]])], dim=1)
    assert digest_of(WIDE) == digest_of(longer)


def test_positions_that_cannot_be_read_are_left_out() -> None:
    unknown = digest_of(None)
    assert digest_of({"handle": 1}) == digest_of(torch.empty(2, 9, device="meta")) == unknown
    assert digest_of(WIDE, length=None) == digest_of(None, length=None) != unknown


def test_an_item_behind_the_prompt_has_no_place() -> None:
    fields = {"multimodal_hashes": [[7] * 8], "multimodal_positions": [9]}
    assert media_items(fields, prompt_len=9) is None
    assert media_items(fields, prompt_len=10) is not None

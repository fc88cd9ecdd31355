"""What one pass of an engine has that is new about one request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """For engines without such a record of their own; fields as in TensorRT-LLM's `RequestData`."""

    request_id: int
    new_tokens: list[int]  # since the last report; the first has all of them
    new_block_ids: list[int]  # likewise
    computed_position: int
    """Where the pass begins, without the tokens that were promised for this very pass."""
    num_scheduled_tokens: int
    is_new: bool  # whether it is the first since the request was asked about
    priorities: None = None
    new_block_ids_by_layer_group: None = None

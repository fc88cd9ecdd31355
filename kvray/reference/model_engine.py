"""The forward pass of a batch: steps of requests through the layers, KV into the pool."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvray.reference.cache_manager import KVCacheManager
from kvray.reference.model import BlockModel, Step
from kvray.reference.request import LlmRequest, ScheduledRequests


@dataclass(slots=True)
class _Run:
    """Consecutive steps of one request in one pass; rows before `first_token` are in the pool.

    The pass samples after the newest token of the request, at `newest_token`, and its drafts.
    """

    request: LlmRequest
    first_token: int
    newest_token: int
    steps: list[Step]
    earlier: torch.Tensor  # ids of the blocks of all steps before
    blocks: torch.Tensor  # of each new row, the id of its block
    rows: torch.Tensor  # and its place there
    is_sampled: bool


class ModelEngine:
    """Runs each layer over all steps of the batch before the next, as a GPU engine does.

    So the connector's hooks fire once per layer and pass. Steps share no arithmetic.
    """

    def __init__(
        self,
        model: BlockModel,
        cache: KVCacheManager,
        *,
        forward_callable: Callable[[], None] | None = None,
    ) -> None:
        self.model = model
        self._cache = cache
        self._forward_callable = forward_callable
        self.hooks: Any = None
        """The connector's worker, called around every layer once it is set."""
        device = model.geometry.device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        """What the passes run on, as the connector's calls are told; None on the host."""

    def warm_up(self) -> None:
        """Run dummies before there is a pool for the connector: only the callable fires."""
        batch = ScheduledRequests()
        padding = self._cache.add_padding_request()
        if padding is None:
            return
        batch.generation_requests.append(padding)
        for _ in range(2):
            self.forward(batch, {})
        self._cache.free_resources(padding)

    @torch.inference_mode()
    def forward(self, batch: ScheduledRequests, pending: Mapping[int, int]) -> dict[int, int]:
        """Compute the pass and return the next token of each request whose prompt is complete.

        `pending` has tokens that were sampled but not added to their requests yet. A request with
        drafts learns how many of them are accepted; its next token comes after those.
        """
        runs = [self._run(request, pending) for request in batch.all_requests()]
        for layer_index in range(self.model.geometry.num_layers):
            if self.hooks is not None:
                self.hooks.wait_for_layer_load(layer_index, self.stream)
            for run in runs:
                self._run_layer(layer_index, run)
            if self.hooks is not None:
                self.hooks.save_kv_layer(layer_index, self.stream)
        sampled = {run.request.request_id: self._sample(run) for run in runs if run.is_sampled}
        if self._forward_callable is not None:
            self._forward_callable()
        return sampled

    def _run(self, request: LlmRequest, pending: Mapping[int, int]) -> _Run:
        size, per_block = self.model.tokens_per_step, self._cache.tokens_per_block
        tokens = request.get_tokens(0)
        if request.request_id in pending:
            tokens.append(pending[request.request_id])
        start = request.num_computed_tokens
        is_context = request.context_remaining_length > 0 and not request.is_dummy
        newest = start + (request.context_chunk_size if is_context else 1) - 1
        assert newest < len(tokens), "a pass computes known tokens and drafts"
        tokens += request.py_draft_tokens
        end = newest + 1 + len(request.py_draft_tokens)
        block_ids = torch.tensor(self._cache.get_cache_indices(request))
        places = torch.arange(start, end)
        device = self.model.geometry.device
        return _Run(
            request=request,
            earlier=block_ids[: start // size * size // per_block].to(device),
            blocks=block_ids[places // per_block].to(device),
            rows=(places % per_block).to(device),
            first_token=start,
            newest_token=newest,
            steps=[
                self.model.begin(tokens[index * size : min(end, (index + 1) * size)], index)
                for index in range(start // size, -(-end // size))
            ],
            is_sampled=not request.is_dummy and end >= request.prompt_len,
        )

    def _run_layer(self, layer_index: int, run: _Run) -> None:
        """Take one layer's earlier blocks out of the pool, and put each new row into it.

        Only blocks of full steps are read. A row is written once, except after a rejected draft: a
        block that was announced or shared never changes afterwards.
        """
        buffers = self._cache.get_buffers(layer_index)
        past = _gather(buffers, run.earlier)
        for step in run.steps:
            past = self.model.layer(layer_index, step, past)
        new = slice(run.first_token, run.first_token + len(run.rows))
        for kind, values in enumerate(past):
            buffers[run.blocks, kind, :, run.rows] = values[0, :, new].transpose(0, 1)

    def _sample(self, run: _Run) -> int:
        """Accept the drafts that greedy sampling repeats; return the token after them."""
        drafts = run.request.py_draft_tokens
        num_accepted, token = 0, self._token_after(run, run.newest_token)
        while num_accepted < len(drafts) and drafts[num_accepted] == token:
            num_accepted += 1
            token = self._token_after(run, run.newest_token + num_accepted)
        run.request.py_num_accepted_draft_tokens = num_accepted
        return token

    def _token_after(self, run: _Run, position: int) -> int:
        index, row = divmod(position, self.model.tokens_per_step)
        step = run.steps[index - run.steps[0].index]
        return int(self.model.logits(step, row).argmax())


def _gather(buffers: torch.Tensor, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the blocks, each contiguous [1, heads, tokens, head_dim]."""
    blocks = buffers[block_ids]
    heads, size, dim = buffers.shape[2:]
    keys, values = (
        blocks[:, kind].transpose(0, 1).reshape(1, heads, len(block_ids) * size, dim)
        for kind in (0, 1)
    )
    return keys, values

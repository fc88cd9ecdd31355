"""What one rank tells its shard beside figures: notes, a sample of prompts, tokens of blocks.

People read the notes, the sample is for the curve of sizes, and KV events have the tokens.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from kvray.identity.block import KEY_BYTES, BlockKey
from kvray.identity.keys import Packed
from kvray.store.sizing.prompts import BLOCKS_MAX, KEYS_MAX, PROMPTS_MAX, SampledPrompts
from kvray.trace.request_note import NOTES_MAX, RequestNote, pack

_WAITING_MAX = 512
_SAID_MAX = 2048


_WAITING_BLOCKS_MAX = 2**17
"""Keys that wait to be looked at; they are kept alive for it."""


class PromptCounts(NamedTuple):
    """What is counted of a prompt; all but the first are blocks."""

    tokens: int = 0
    asked: int = 0
    """Leading ones that could be promised."""
    own: int = 0
    """Those of them that the engine had itself."""
    hit: int = 0
    """Those that the tier promised it."""
    disk: int = 0
    """Of these, what came from the node's disk."""
    remote: int = 0
    """And what other nodes sent."""


class PromptNotes:
    """The prompts that wait for the next report.

    The engine's thread notes, in less than a microsecond and without a lock; the link's thread
    looks at the keys. Each has a counter of its own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, Sequence[BlockKey], PromptCounts]] = deque()
        self._num_in = self._num_out = 0
        self._num_lost = self._num_told = 0
        self._limit = -1

    def note(self, keys: Sequence[BlockKey], counts: PromptCounts) -> None:
        """Note a prompt; `keys` is not changed any more, and has the answer's blocks too."""
        if self._num_in - self._num_out > _WAITING_BLOCKS_MAX or len(self._waiting) >= PROMPTS_MAX:
            self._num_lost += 1
            return
        self._num_in += len(keys)
        self._waiting.append((self._clock(), keys, counts))

    def hear(self, limit: object) -> None:
        """Note the limit of what the shard wants next; another object, such as None: nothing."""
        self._limit = limit if isinstance(limit, int) else -1

    def take(self) -> SampledPrompts | None:
        """Return a sample of the oldest prompts that wait, as many as a report may have.

        None: the shard wants none, or there are none.
        """
        limit, num_lost = self._limit, self._num_lost
        if limit < 0 or not (self._waiting or num_lost > self._num_told):
            return None
        now, sums = self._clock(), np.zeros(6, dtype=np.int64)
        ages, lengths, parts = [], [], []
        num_keys = 0
        while self._waiting and num_keys <= KEYS_MAX - BLOCKS_MAX:
            at, keys, counted = self._waiting.popleft()
            self._num_out += len(keys)
            asked = min(counted.asked, len(keys), BLOCKS_MAX)
            own = min(counted.own, asked)
            hit = min(counted.hit, asked - own)
            disk = min(counted.disk, hit)
            sums += counted.tokens, asked, own, hit, disk, min(counted.remote, hit - disk)
            numbers = np.frombuffer(b"".join(keys[:BLOCKS_MAX]), "<u8")[:: KEY_BYTES // 8]
            mask = numbers <= limit
            if count := int(np.count_nonzero(mask)):
                ages.append(max(0.0, now - at))
                counts = np.count_nonzero(mask[:asked]), np.count_nonzero(mask[:own])
                lengths.append((count, *map(int, counts)))
                parts.append(numbers[mask])
                num_keys += count
        num_told, self._num_told = self._num_told, num_lost
        tokens, blocks, own, hit, disk, remote = sums.tolist()
        return SampledPrompts(
            limit=limit,
            num_lost=num_lost - num_told,
            num_blocks=blocks,
            num_own=own,
            num_hit=hit,
            num_disk=disk,
            num_remote=remote,
            num_tokens=tokens,
            ages=np.array(ages, dtype="<f4"),
            lengths=np.array(lengths, dtype="<u4").reshape(-1, 3),
            keys=np.concatenate(parts) if parts else np.zeros(0, dtype="<u8"),
        )


HASH_BYTES = 8
"""Leading bytes of a key that are the block's hash in KV events."""
_TOKEN_BYTES_MAX = 64 * 2**20  # bytes of tokens
_UNHEARD_MAX = 8 * 2**20  # the same before the shard has said whether it publishes anything
_FRAME_MAX = 2**18  # larger ones cost several times as much a byte: the memory is new each time
_CHAINS_MAX = 2048  # in a frame, which may not have too many values
_STRIDE = 16  # of so many blocks one is remembered as told: up to as many are told twice
_TOLD_MAX = 50_000


class Chain(NamedTuple):
    """Blocks of one prompt, one after the other."""

    parent: bytes
    """The hash of the block before them; empty: they begin the prompt."""
    hashes: bytes
    tokens: memoryview
    """Their tokens as u32 end to end, little-endian."""


class _Note(NamedTuple):
    keys: list[BlockKey]
    first: int
    end: int
    tokens: memoryview
    """Bytes, from those of block `first` on."""


class BlockTokens:
    """What waits to be told, and what was told already.

    The engine's thread notes, in about a microsecond and without a lock; the link's thread takes
    and tells. Each of the two counts is written by one of them. Beyond the limit new notes are
    dropped; they are made again when the prompt recurs.
    """

    def __init__(self) -> None:
        self.generation: int | None = None
        """The shard's number of what it was told, to be told again where it changes; None: the
        shard publishes nothing."""
        self._waiting: deque[_Note] = deque()
        self._waiting_max = _UNHEARD_MAX
        self._noted = self._taken = 0
        self._told: set[BlockKey] = set()

    def note(self, keys: list[BlockKey], first: int, packed: Packed) -> None:
        """Note the blocks from `first` on, whose tokens begin `packed`; neither changes later.

        More keys may be appended.
        """
        if self._noted - self._taken < self._waiting_max:
            tokens = memoryview(cast(Any, packed)).cast("B")
            self._noted += len(tokens)
            self._waiting.append(_Note(keys, first, len(keys), tokens))

    def hear(self, generation: object) -> None:
        """Take the shard's word on what it knows."""
        heard = generation if isinstance(generation, int) else None
        self._waiting_max = 0 if heard is None else _TOKEN_BYTES_MAX
        if heard != self.generation:
            self._told.clear()
            self.generation = heard
        if heard is None:
            while self._waiting:
                self._taken += len(self._waiting.popleft().tokens)

    def take(self, tokens_per_block: int) -> list[Chain]:
        """Return what to tell next, about a frame's worth; nothing: all was told.

        It counts as told: who cannot tell it has to `forget`.
        """
        chains: list[Chain] = []
        size, step = 0, 4 * tokens_per_block
        while self._waiting and size < _FRAME_MAX and len(chains) < _CHAINS_MAX:
            note = self._waiting.popleft()
            self._taken += len(note.tokens)
            at = self._untold_from(note)
            end = min(note.end, at + max(1, _FRAME_MAX // step))
            if at < end:
                start, stop = (step * (one - note.first) for one in (at, end))
                chains.append(_chain(note.keys, at, end, note.tokens[start:stop]))
                self._told.update(note.keys[at | (_STRIDE - 1) : end : _STRIDE])
                self._told.add(note.keys[end - 1])
                size += stop - start
            if end < note.end:
                rest = note._replace(first=end, tokens=note.tokens[step * (end - note.first) :])
                self._taken -= len(rest.tokens)
                self._waiting.appendleft(rest)
        return chains

    def forget(self) -> None:
        """Have everything told again, as prompts come."""
        self._told.clear()

    def _untold_from(self, note: _Note) -> int:
        """Return the first block of a note that may not have been told; its end: all were."""
        if len(self._told) > _TOLD_MAX:
            self._told.clear()
        if note.keys[note.end - 1] in self._told:
            return note.end
        # Those that were told come first: no block is told without its head.
        marks = range(note.first | (_STRIDE - 1), note.end, _STRIDE)
        num_told = bisect_left(marks, True, key=lambda at: note.keys[at] not in self._told)
        return marks[num_told - 1] + 1 if num_told else note.first


def _chain(keys: list[BlockKey], at: int, end: int, tokens: memoryview) -> Chain:
    words = np.frombuffer(b"".join(keys[at:end]), f"V{HASH_BYTES}")
    parent = keys[at - 1][:HASH_BYTES] if at else b""
    return Chain(parent, words[:: KEY_BYTES // HASH_BYTES].tobytes(), tokens)


class EngineLog:
    """What one rank has for its shard's next reports; it has the latest requests itself.

    The engine's thread notes, in about a microsecond and without a lock; the link's thread reports.
    Both use `_waiting`, a deque that drops the oldest beyond its bound.
    """

    def __init__(self) -> None:
        self.prompts = PromptNotes()
        self.block_tokens = BlockTokens()
        self._waiting: deque[RequestNote] = deque(maxlen=_WAITING_MAX)
        self._reported: list[RequestNote] = []
        self._said: OrderedDict[int, tuple[int, int, str]] = OrderedDict()
        """Request -> its last note: a full engine asks again in every pass."""

    def note(self, note: RequestNote) -> None:
        """Note the outcome of a request, unless it is the last one again."""
        came = note.first, note.end, note.reason
        if self._said.get(note.request_id) == came:
            return
        self._said[note.request_id] = came
        if len(self._said) > _SAID_MAX:
            self._said.popitem(last=False)
        self._waiting.append(note)

    def hear(self, reply: dict[str, Any]) -> None:
        """Take from a reply what the shard wants next; of tokens it does not always speak."""
        self.prompts.hear(reply.get("sample"))
        if "describe" in reply:
            self.block_tokens.hear(reply["describe"])

    def drain(self) -> dict[str, object]:
        """Return the fields of the next report; if the shard does not take it, `give_back`.

        Requests go the oldest first, without those whose numbers no frame carries.
        """
        count = min(NOTES_MAX, len(self._waiting))
        self._reported = [self._waiting.popleft() for _ in range(count)]
        packed = []
        for note in self._reported:
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                packed.append(pack(note))
        prompts = self.prompts.take()
        return {"requests": packed, **({} if prompts is None else {"prompts": prompts.pack()})}

    def give_back(self) -> None:
        """Report the notes on requests once more, as far as there is room.

        A sample of prompts may be lost.
        """
        room = _WAITING_MAX - len(self._waiting)
        self._waiting.extendleft(reversed(self._reported[max(0, len(self._reported) - room) :]))

from typing import Any

import pytest

from kvray.actors.lookup.stored_digests import Finding, Note, Origin
from kvray.actors.shard import digest_desk as desk_module
from kvray.actors.shard.digest_desk import DigestDesk
from kvray.errors import ConfigError
from kvray.trace.prefix_digest import NOTES_MAX
from tests.unit.actors.small_shard import NAMESPACE, OTHER_LAYOUT

MINE = Origin(replica="mine", rank=0, namespace=NAMESPACE)


def digest(number: int) -> bytes:
    return number.to_bytes(8, "little")


def finding(num_tokens: int, rank: int = 0) -> Finding:
    origin = Origin(replica="mine", rank=rank, namespace=NAMESPACE)
    return Finding(origin, num_tokens, "theirs", OTHER_LAYOUT, digest(0))


def numbers(notes: list[Note]) -> list[int]:
    return [int.from_bytes(note[1], "little") for note in notes]


def test_notes_are_due_until_the_lookup_has_taken_them() -> None:
    desk = DigestDesk()
    desk.note(MINE, [(digest(1), 0), (digest(2), 64)])
    assert numbers(desk.due(full=False)) == [1, 2]
    desk.note(MINE, [(digest(3), 0)])
    assert numbers(desk.due(full=False)) == [1, 2, 3]
    desk.settle([])
    assert desk.due(full=False) == []


def test_what_comes_in_while_the_lookup_is_told_stays_due() -> None:
    desk = DigestDesk()
    desk.note(MINE, [(digest(1), 0)])
    desk.due(full=False)
    desk.note(MINE, [(digest(2), 0)])
    desk.settle([])
    assert numbers(desk.due(full=False)) == [2]


def test_a_full_telling_has_what_was_stored_before_and_no_miss_twice() -> None:
    desk = DigestDesk()
    desk.note(MINE, [(digest(1), 0), (digest(2), 64), (digest(1), 0)])
    desk.due(full=False)
    desk.settle([])
    desk.note(MINE, [(digest(3), 64)])
    assert numbers(desk.due(full=True)) == [1, 3]


def test_answers_are_given_once_to_the_rank_that_asked() -> None:
    desk = DigestDesk()
    desk.settle([finding(64), finding(32), finding(7, rank=1)])
    (answer,) = desk.answers("mine", 0)
    assert (answer["num_tokens"], answer["replica"]) == (96, "theirs")
    assert answer["difference"] == {
        "kv_dtype": ("bfloat16", "float8"),
        "part_bytes": (512, 256),
    }
    assert desk.answers("mine", 0) == []
    assert [one["num_tokens"] for one in desk.answers("mine", 1)] == [7]


def test_what_is_too_much_is_lost_and_the_oldest_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "_PENDING_MAX", 3)
    monkeypatch.setattr(desk_module, "_SENT_MAX", 2)
    desk = DigestDesk()
    desk.note(MINE, [(digest(1), 0), (digest(2), 0)])
    desk.note(MINE, [(digest(3), 0), (digest(4), 0)])
    assert numbers(desk.due(full=False)) == [1, 2]
    desk.settle([])
    assert numbers(desk.due(full=False)) == [3]


def test_findings_for_ranks_that_never_ask_again_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(desk_module, "_RANKS_MAX", 2)
    desk = DigestDesk()
    desk.settle([finding(1, rank) for rank in range(3)])
    assert [len(desk.answers("mine", rank)) for rank in range(3)] == [0, 1, 1]


@pytest.mark.parametrize(
    "note",
    [5, "ab", [digest(1)], [b"short", 0], ["text", 0], [digest(1), -1], [digest(1), "many"]],
)
def test_a_broken_note_costs_itself(note: Any) -> None:
    desk = DigestDesk()
    assert desk.note(MINE, [[digest(7), 0], note, [digest(8), 64]]) == 1
    assert desk.due(full=False) == [(MINE, digest(7), 0), (MINE, digest(8), 64)]


@pytest.mark.parametrize("notes", [5, "ab", [[digest(1), 0]] * (NOTES_MAX + 1)])
def test_what_is_no_list_of_notes_is_refused(notes: Any) -> None:
    desk = DigestDesk()
    with pytest.raises(ConfigError):
        desk.note(MINE, notes)
    assert desk.due(full=False) == []

"""Notes of an engine's thread on their way to the shard."""

from kvray.node import RequestNotes
from kvray.node.request_notes import packed
from kvray.trace.request_note import NOTES_MAX, RequestNote


def note(request_id: int, *, end: int = 0) -> RequestNote:
    return RequestNote(request_id, 1.0, 40, 4, 0, end, 9, "not_stored")


def test_what_was_noted_is_taken_once_in_its_order() -> None:
    notes = RequestNotes()
    for number in (3, 1, 2):
        notes.note(note(number))
    assert [one.request_id for one in notes.take()] == [3, 1, 2]
    assert notes.take() == []


def test_a_request_that_is_asked_about_again_with_the_same_end_is_noted_once() -> None:
    notes = RequestNotes()
    notes.note(note(1))
    notes.note(note(1))
    notes.note(note(1, end=4))
    assert [one.end for one in notes.take()] == [0, 4]


def test_what_could_not_be_reported_waits_in_front_of_the_rest() -> None:
    notes = RequestNotes()
    notes.note(note(1))
    taken = notes.take()
    notes.note(note(2))
    notes.give_back(taken)
    assert [one.request_id for one in notes.take()] == [1, 2]


def test_notes_that_nobody_takes_are_bounded_and_the_latest_stay() -> None:
    notes = RequestNotes()
    for number in range(2000):
        notes.note(note(number))
    first = notes.take()
    assert len(first) == NOTES_MAX
    notes.give_back(first)
    taken = []
    while some := notes.take():
        taken += some
    assert [one.request_id for one in taken] == list(range(2000 - len(taken), 2000))


def test_a_number_that_no_frame_carries_costs_its_own_note_only() -> None:
    assert len(packed([note(1), note(2**70), note(2)])) == 2

"""Notes of an engine's thread on what took time, on their way to the shard."""

from kvray.node import SpanNotes
from kvray.trace.span_note import SPAN_NOTES_MAX, SpanNote


def test_notes_are_taken_once_in_order_and_nobody_has_to_take_them() -> None:
    notes = SpanNotes()
    for number in range(5000):
        notes.note(SpanNote("load", number, 1.0, 2.0, {}))
    taken = []
    while some := notes.take():
        assert len(some) <= SPAN_NOTES_MAX
        taken += some
    assert [one.request_id for one in taken] == list(range(5000 - len(taken), 5000))
    assert len(taken) == 4000

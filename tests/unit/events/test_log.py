"""The batches that a publisher keeps for replays."""

from hypothesis import given
from hypothesis import strategies as st

from kvray.events.native import EventLog


@given(
    st.integers(0, 2**62), st.integers(1, 5), st.integers(1, 40), st.lists(st.binary(max_size=20))
)
def test_the_latest_batches_are_kept_within_the_bounds(first, batches_max, bytes_max, payloads):
    log = EventLog(first, batches_max=batches_max, bytes_max=bytes_max)
    assert (log.oldest, log.last) == (first, first - 1)

    numbers = [log.add(payload) for payload in payloads]

    assert numbers == list(range(first, first + len(payloads)))
    assert log.last == first + len(payloads) - 1
    kept = [log[number] for number in range(log.oldest, log.last + 1)]
    assert kept == payloads[len(payloads) - len(kept) :]
    assert len(kept) <= batches_max
    assert sum(map(len, kept)) <= bytes_max
    if len(kept) < min(len(payloads), batches_max):
        assert sum(map(len, kept)) + len(payloads[len(payloads) - len(kept) - 1]) > bytes_max

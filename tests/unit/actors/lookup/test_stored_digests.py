from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvray.actors.lookup.stored_digests import Note, Origin, StoredDigests
from kvray.identity.block import namespace_id
from tests.unit.actors.small_shard import NAMESPACE

TP1 = NAMESPACE
TP2 = replace(NAMESPACE, tp_layout="tp2")
FP8_TP2 = replace(TP2, kv_dtype="float8")
NAMESPACES = (TP1, TP2, FP8_TP2)


def origin(namespace: int = 0, replica: str | None = None) -> Origin:
    """Return rank 0 of the replica `a`, `b` or `c`, by its namespace."""
    return Origin(replica=replica or "abc"[namespace], rank=0, namespace=NAMESPACES[namespace])


def digest(number: int) -> bytes:
    return number.to_bytes(8, "little")


def stored(number: int, namespace: int = 0, replica: str | None = None) -> Note:
    return origin(namespace, replica), digest(number), 0


def missed(number: int, namespace: int, num_tokens: int = 100) -> Note:
    return origin(namespace), digest(number), num_tokens


def memory(namespaces_max: int = 8, digests_max: int = 8) -> StoredDigests:
    return StoredDigests(namespaces_max=namespaces_max, digests_max=digests_max)


def test_a_miss_that_another_namespace_has_stored_is_found() -> None:
    (finding,) = memory().take([stored(1, 0), missed(1, 1)])
    assert (finding.origin, finding.num_tokens) == (origin(1), 100)
    assert (finding.replica, finding.namespace) == ("a", TP1)
    assert finding.prefix_digest == missed(1, 1)[1]


def test_a_miss_that_nobody_has_stored_is_not_found() -> None:
    assert memory().take([stored(1, 0), missed(2, 1)]) == []


def test_a_miss_that_its_own_namespace_has_stored_too_is_not_found() -> None:
    assert memory().take([stored(1, 0), stored(1, 1), missed(1, 1)]) == []


def test_what_a_replica_stores_after_its_miss_does_not_explain_the_miss_away() -> None:
    assert len(memory().take([stored(1, 0), missed(1, 1), stored(1, 1)])) == 1


def test_of_several_namespaces_the_likest_one_is_named() -> None:
    (finding,) = memory().take([stored(1, 0), stored(1, 1), missed(1, 2)])
    assert (finding.replica, finding.namespace) == ("b", TP2)


def test_who_stored_it_last_is_named() -> None:
    (finding,) = memory().take([stored(1, 0, "old"), stored(1, 0, "new"), missed(1, 1)])
    assert finding.replica == "new"


def test_of_too_many_prefix_digests_the_longest_unheard_of_goes() -> None:
    full = memory(digests_max=2)
    full.take([stored(1), stored(2), stored(1), stored(3)])
    found = full.take([missed(number, 1) for number in (1, 2, 3)])
    assert [finding.num_tokens for finding in found] == [100, 100]
    assert full.take([missed(2, 1)]) == []


def test_of_too_many_namespaces_the_longest_unheard_of_goes() -> None:
    full = memory(namespaces_max=2)
    full.take([stored(1, 0), stored(1, 1), stored(2, 0), stored(1, 2)])
    (finding,) = full.take([missed(2, 1)])
    assert finding.namespace == TP1


notes = st.lists(
    st.tuples(
        st.sampled_from([origin(n, replica) for n in range(3) for replica in ("x", "y")]),
        st.integers(0, 5).map(digest),
        st.sampled_from([0, 0, 7, 9]),
    ),
    max_size=60,
)


@given(notes, notes)
def test_findings_are_those_of_a_memory_without_bounds(before: list[Note], now: list[Note]) -> None:
    """What is found, told note by note, against sets that forget nothing."""
    real = memory()
    known: dict[object, set[bytes]] = {namespace: set() for namespace in NAMESPACES}
    for note in before + now:
        who, what, num_tokens = note
        found = real.take([note])
        if num_tokens == 0:
            known[who.namespace].add(what)
        has_it = {namespace for namespace, has in known.items() if what in has}
        wanted = num_tokens > 0 and has_it and who.namespace not in has_it
        assert [finding.num_tokens for finding in found] == ([num_tokens] if wanted else [])
        assert all(finding.namespace in has_it for finding in found)


@given(notes, notes, st.integers(1, 3), st.integers(1, 6))
def test_a_memory_that_is_told_again_answers_as_the_one_before(
    before: list[Note], now: list[Note], namespaces_max: int, digests_max: int
) -> None:
    first, second = (memory(namespaces_max, digests_max) for _ in range(2))
    first.take(before)
    assert second.take(first.notes()) == []
    assert first.take(now) == second.take(now)


@given(notes, st.integers(1, 2), st.integers(1, 4))
def test_a_memory_never_outgrows_its_bounds(
    before: list[Note], namespaces_max: int, digests_max: int
) -> None:
    full = memory(namespaces_max, digests_max)
    full.take(before)
    assert len(full) == len(list(full.notes())) <= namespaces_max * digests_max


def test_its_numbers_are_those_of_the_namespaces_that_it_remembers() -> None:
    remembered = memory(namespaces_max=2)
    for namespace in (0, 1, 0, 2):
        remembered.add(stored(1, namespace))
    kept = [namespace_id(one.digest()) for one in (TP1, FP8_TP2)]
    assert sorted(remembered.numbers()) == sorted(kept)

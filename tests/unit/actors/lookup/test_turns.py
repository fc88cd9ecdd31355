from kvray.actors.lookup.lookup import TURN_S, TURNS, Turns


def full() -> Turns:
    """Turns that are all taken at 0."""
    turns = Turns()
    for number in range(TURNS):
        assert turns.take(f"s{number}", 0.0) == 0
    return turns


def test_when_all_turns_are_taken_the_next_is_told_when_to_ask() -> None:
    assert 0 < full().take("late", 0.0) < 1


def test_who_has_a_turn_may_begin_again() -> None:
    assert full().take("s0", 1.0) == 0


def test_a_turn_ends_with_the_last_piece() -> None:
    turns = full()
    turns.go_on("s3", 1.0, more=True)
    assert turns.take("late", 1.0) > 0
    turns.go_on("s3", 1.0, more=False)
    assert turns.take("late", 1.0) == 0
    assert turns.take("later", 1.0) > 0


def test_a_turn_of_one_that_says_nothing_more_ends_by_itself() -> None:
    turns = full()
    for number in range(1, TURNS):
        turns.go_on(f"s{number}", TURN_S - 1, more=True)
    assert turns.take("late", TURN_S - 0.1) > 0
    assert turns.take("late", TURN_S + 0.1) == 0
    assert turns.take("later", TURN_S + 0.1) > 0


def test_a_piece_of_one_that_has_no_turn_takes_none() -> None:
    turns = Turns()
    for number in range(TURNS):
        turns.go_on(f"other {number}", 0.0, more=True)
    assert turns.take("a", 0.0) == 0


def test_however_many_wait_so_many_ask_in_a_second() -> None:
    turns = full()
    asks = [turns.take(f"w{number}", 0.0) for number in range(2000)]
    assert asks[0] == 0.5
    for second in range(1, 10):
        assert 199 <= sum(second <= at < second + 1 for at in asks) <= 201


def test_those_that_ask_no_more_are_not_waited_for() -> None:
    turns = full()
    for number in range(2000):
        turns.take(f"w{number}", 0.0)
    for number in range(TURNS):
        turns.take(f"s{number}", 30.0)
    assert turns.take("late", 30.0) == 0.5

"""The blocks of prompts under way."""

from kvray.routing.standings import Coming


def test_blocks_are_here_while_a_prompt_with_them_is_under_way() -> None:
    coming: Coming[str] = Coming()
    coming.add("abc")
    coming.add("abd")
    assert (coming.leading("abde"), coming.leading("abce"), coming.leading("x")) == (3, 3, 0)
    coming.remove("abd")
    assert coming.leading("abde") == 2
    coming.remove("abc")
    assert coming.leading("abde") == 0

from kvray.lab.demo.report import colour_of
from tests.unit.lab.demo.test_record import make_output


def test_bars_tell_where_prefixes_came_from() -> None:
    outputs = (make_output(), make_output(reused_tokens=32), make_output(hit_tokens=32))
    assert len({colour_of(output) for output in outputs}) == 3


def test_a_hit_beside_what_the_pool_had_is_a_hit() -> None:
    both = make_output(reused_tokens=32, hit_tokens=32)
    assert colour_of(both) == colour_of(make_output(hit_tokens=32))

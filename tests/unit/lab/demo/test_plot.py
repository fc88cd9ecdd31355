from kvray.lab.demo.plot import colour_of
from tests.unit.lab.demo.test_record import make_record


def test_bars_tell_where_prefixes_came_from() -> None:
    records = (make_record(), make_record(reused_tokens=32), make_record(hit_tokens=32))
    assert len({colour_of(record) for record in records}) == 3


def test_a_hit_beside_what_the_pool_had_is_a_hit() -> None:
    both = make_record(reused_tokens=32, hit_tokens=32)
    assert colour_of(both) == colour_of(make_record(hit_tokens=32))

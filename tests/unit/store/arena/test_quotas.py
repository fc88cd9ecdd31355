"""What the namespaces of an arena take, and what they may."""

import numpy as np
import pytest

from kvray.errors import ConfigError
from kvray.store.arena import quotas
from kvray.store.arena.layout import QUOTAS_MAX
from kvray.store.arena.tables import Tables
from tests.unit.store.small_arena import SLOT, chain, make_tables, put, reserve

ABCD, ABEF = (int.from_bytes(bytes.fromhex(name), "little") for name in ("abcd0000", "abef0000"))


def test_every_namespace_takes_what_its_ready_blocks_have(tables: Tables) -> None:
    put(tables, chain(3), namespace=1)
    put(tables, chain(2, seed="two"), namespace=2, block_bytes=2 * SLOT)
    put(tables, chain(1, seed="none"))
    reserve(tables, chain(4, seed="under way"), namespace=1)
    assert quotas.used(tables) == {1: (3, 3 * SLOT), 2: (2, 4 * SLOT), 0: (1, SLOT)}


def test_many_namespaces_are_summed_up_as_few_are() -> None:
    tables = make_tables(num_slabs=16)
    for namespace in range(40):
        put(tables, chain(1 + namespace % 3, seed=str(namespace)), namespace=namespace)
    sums = {one: (1 + one % 3, (1 + one % 3) * SLOT) for one in range(40)}
    assert quotas.used(tables) == sums


def test_an_empty_arena_is_used_by_nobody(tables: Tables) -> None:
    assert quotas.used(tables) == {}
    assert quotas.excess(tables) == {}


def test_the_longest_name_that_fits_says_the_quota(tables: Tables) -> None:
    quotas.set_quotas(tables, {"": 1, "ab": 2, "ABcd": 3, "abcd0000" + 56 * "1": 4})
    assert quotas.quota_of(tables, ABCD) == 4
    assert quotas.quota_of(tables, ABCD + 2**31) == 3
    assert quotas.quota_of(tables, ABEF) == 2
    assert quotas.quota_of(tables, 1) == 1


def test_without_a_quota_that_fits_there_is_no_bound(tables: Tables) -> None:
    quotas.set_quotas(tables, {"abcd": 3})
    assert quotas.quota_of(tables, ABEF) is None
    quotas.set_quotas(tables, {})
    assert quotas.quota_of(tables, ABCD) is None


def test_a_namespace_that_is_not_known_has_no_quota(tables: Tables) -> None:
    quotas.set_quotas(tables, {"": 1})
    assert quotas.quota_of(tables, 0) is None


def test_a_namespace_is_over_by_what_it_has_beyond_its_quota(tables: Tables) -> None:
    put(tables, chain(3), namespace=ABCD)
    put(tables, chain(2, seed="other"), namespace=ABEF)
    quotas.set_quotas(tables, {"": 2 * SLOT})
    assert quotas.excess(tables) == {ABCD: SLOT}
    quotas.set_quotas(tables, {"": 2 * SLOT, "abcd": 9 * SLOT, "abe": 1})
    assert quotas.excess(tables) == {ABEF: 2 * SLOT - 1}


def test_names_of_namespaces_are_those_that_people_see() -> None:
    assert quotas.name_of(ABCD) == "abcd0000"


@pytest.mark.parametrize("names", [["xyz"], [str(number) for number in range(QUOTAS_MAX + 1)]])
def test_quotas_that_cannot_be_kept_are_refused(tables: Tables, names: list[str]) -> None:
    with pytest.raises(ConfigError):
        quotas.set_quotas(tables, dict.fromkeys(names, 1))
    assert not np.any(tables.quota_bytes)

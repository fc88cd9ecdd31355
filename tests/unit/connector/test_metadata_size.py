"""Every rank waits for the metadata of a pass, so it stays small."""

import pickle

from kvray.connector.meta import ConnectorMeta, LoadPlan, PageIds, RankLeases, SavePlan
from kvray.store import Lease


def test_metadata_costs_a_page_a_block_a_key_a_saved_block_and_a_small_constant() -> None:
    def meta(num_blocks: int) -> bytes:
        lease = Lease(lease_id=2**40, page=7, num_slots=num_blocks, check=2**63)
        pages = (PageIds.of(list(range(num_blocks))),)
        load = LoadPlan(3, RankLeases(("a" * 32,), (lease,)), num_blocks, 0, pages)
        save = SavePlan(3, 0, b"k" * 32 * num_blocks, pages)
        made = ConnectorMeta(namespace=b"n" * 32, loads=(load,), saves=(save,))
        assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301 (made right here)
        return pickle.dumps(made)

    assert len(meta(4096)) - len(meta(0)) < (2 * 4 + 32) * 4096 + 64

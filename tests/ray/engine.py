"""An engine of a test: evaluates the lines on its standard input and answers each with its repr.

Run as `python -m tests.ray.engine DIRECTORY`.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvray.identity.block import Namespace
from kvray.node import PrefixDigests, Registration, attach
from kvray.trace.prefix_digest import prefix_digest
from tests.unit.store.small_arena import chain, fetch, store

NAMESPACE = Namespace(
    model="key:test@1",
    quantization="none",
    overrides="",
    kv_dtype="float32",
    num_layers=1,
    kv_factor=2,
    tokens_per_block=32,
    part_bytes=4096,
    num_parts=1,
    tp_layout="tp1",
    layer_groups="",
    attention_backend="test",
    engine="test 1.0",
)

_MISSED = "miss_tokens_not_stored"


def main() -> None:
    link = attach(Path(sys.argv[1]), label="engine", lock_wait_s=0.5, attach_retry_s=0.1)
    registration = Registration(
        replica="one", rank=0, namespace=NAMESPACE, counters=lambda: {"hits": 1}
    )
    prefix_digests = PrefixDigests()

    def register(replica: str, **changes: Any) -> None:
        """Register a rank that notes prefix digests, in a namespace with `changes`."""
        link.register(
            Registration(
                replica=replica,
                rank=0,
                namespace=replace(NAMESPACE, **changes),
                counters=lambda: prefix_digests.counted({_MISSED: 10_000}, _MISSED),
                prefix_digests=prefix_digests,
            )
        )

    scope = {
        "chain": chain,
        "fetch": fetch,
        "link": link,
        "prefix_digest": prefix_digest,
        "prefix_digests": prefix_digests,
        "register": register,
        "registration": registration,
        "store": store,
        "sys": sys,
    }
    print("started", flush=True)
    for line in sys.stdin:
        try:
            answer = repr(eval(line, scope))
        except Exception as error:  # noqa: BLE001 - the test wants to see it
            answer = repr(error)
        print(answer, flush=True)
    link.detach()


if __name__ == "__main__":
    main()

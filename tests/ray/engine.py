"""An engine of a test: evaluates the lines on its standard input and answers each with its repr.

Run as `python -m tests.ray.engine DIRECTORY`.
"""

import sys
from pathlib import Path

from kvray.identity.block import Namespace
from kvray.node import Registration, attach
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


def main() -> None:
    link = attach(Path(sys.argv[1]), label="engine", lock_wait_s=0.5, attach_retry_s=0.1)
    registration = Registration(
        replica="one", rank=0, namespace=NAMESPACE, counters=lambda: {"hits": 1}
    )
    scope = {
        "chain": chain,
        "fetch": fetch,
        "link": link,
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

"""Another process with a cache; it answers each line of stdin, a call as JSON, with one line."""

import json
import sys

from kvray.config import KVRayConfig
from kvray.tensor_cache import TensorCache
from tests.unit.tensor_cache.conftest import METADATA
from tests.unit.tensor_cache.kv import as_blob, random_blob


def main() -> None:
    config = KVRayConfig.model_validate_json(sys.argv[1])
    with TensorCache(config, METADATA) as cache:
        print("started", flush=True)
        for line in sys.stdin:
            op, first, count, seed = json.loads(line)
            tokens = list(range(first, first + count))
            blob = random_blob(count, METADATA, seed=seed)
            if op == "store":
                answer: object = cache.store(tokens, blob)
            else:
                kv, _ = cache.retrieve(tokens)
                answer = bool(kv) and as_blob(kv).equal(as_blob(blob))
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

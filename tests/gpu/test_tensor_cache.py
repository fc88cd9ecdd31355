import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from kvray.config import load_config
from kvray.tensor_cache import TensorCache
from tests.unit.tensor_cache.conftest import start_shard
from tests.unit.tensor_cache.kv import METADATA, assert_same, changed, random_blob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["huggingface", "vllm"])
def test_tensors_on_a_gpu_are_stored_bit_for_bit(layout, dtype, blocking):
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    sizes = {"arena.capacity": "1MiB", "arena.slab": "64KiB", "arena.slot_min": "4KiB"}
    config = load_config(environ={}, overrides={"arena.dir": str(directory), **sizes})
    shard = start_shard(config)
    try:
        with TensorCache(config, changed(METADATA, layout=layout, dtype=dtype)) as cache:
            blob = random_blob(40, cache.metadata)
            on_gpu = blob.cuda()
            cache.store(torch.arange(40, device="cuda"), on_gpu, blocking=blocking)
            on_gpu.view(torch.uint8).zero_()
            assert cache.flush()
            kv, ret_mask = cache.retrieve(list(range(40)))
            assert int(ret_mask.sum()) == 40
            assert_same(kv, blob)
    finally:
        shard.stop(retire=True, timeout_s=10)
        shutil.rmtree(directory)

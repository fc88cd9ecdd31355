"""vLLM as a witness: the same prompts, with the connector and without, on an engine not our own."""

MODULE = "kvray.lab.vllm.engine"
"""What a `Replica` runs that is vLLM."""


def environ(num_threads: int) -> dict[str, str]:
    """Return the variables of such a replica; equal answers need equal numbers of threads."""
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; a pool with its own number of blocks has those
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }

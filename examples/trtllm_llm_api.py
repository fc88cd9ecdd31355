"""TensorRT-LLM's own LLM API with kvray's connector: two engines, one after the other.

Needs TensorRT-LLM, a GPU, and a tier on this node (`kvray up`); without the first two it says so
and ends. The second engine starts with an empty pool and finds the prefix in the tier.

    kvray up -c kvray.yaml
    python examples/trtllm_llm_api.py --model TinyLlama/TinyLlama-1.1B-Chat-v1.0 --config kvray.yaml
"""

import argparse
import sys
from pathlib import Path
from typing import Any

PROMPT = (
    "The library of a small town keeps its books in three rooms. The first room has everything"
    " that was printed before the war, the second has what came after it, and the third belongs to"
    " the children, who may take down any book that they can reach. The librarian knows most of her"
    " readers by name, and she puts aside what she believes they will ask for next. Every evening"
    " she writes into a ledger which books have left the house and which have come back, and on"
    " Fridays she reads the ledger from the first page on, because a book that is missing for a"
    " year is seldom asked for but often missed. Tell me what the third room is for."
)


def find_obstacle() -> str | None:
    """Return why this cannot run here, or None."""
    try:
        import tensorrt_llm  # noqa: F401
    except ImportError:
        return (
            "TensorRT-LLM is not installed; on a machine with an NVIDIA GPU run"
            " pip install 'kvray[trtllm]'"
        )
    import torch

    if not torch.cuda.is_available():
        return "there is no NVIDIA GPU here"
    return None


def class_name(name: str, config: Path | None) -> str:
    """Return the connector's class with the configuration it is to read, which may ride along."""
    return f"{name}@{config.absolute()}" if config else name


def answer(model: str, config: Path | None) -> str:
    """Start an engine, ask it, and end it."""
    from tensorrt_llm import LLM, SamplingParams
    from tensorrt_llm.llmapi.llm_args import KvCacheConfig, KvCacheConnectorConfig

    options: dict[str, Any] = {
        "model": model,
        "backend": "pytorch",
        "cuda_graph_config": None,  # the first versions with connectors refuse graphs beside them
        # With partial reuse each pass would wait until its blocks were read.
        "kv_cache_config": KvCacheConfig(enable_block_reuse=True, enable_partial_reuse=False),
        "kv_connector_config": KvCacheConnectorConfig(
            connector_module="kvray.connector",
            connector_scheduler_class=class_name("KvRayScheduler", config),
            connector_worker_class=class_name("KvRayWorker", config),
        ),
    }
    with LLM(**options) as llm:
        output = llm.generate([PROMPT], SamplingParams(max_tokens=32, temperature=0.0))[0]
        return str(output.outputs[0].text)


def main() -> None:
    """Ask two engines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="TinyLlama/TinyLlama-1.1B-Chat-v1.0")
    parser.add_argument("--config", type=Path, help="kvray.yaml (default: the one `kvray` takes)")
    args = parser.parse_args()
    obstacle = find_obstacle()
    if obstacle is not None:
        print(f"Skipped: {obstacle}.")
        sys.exit(0)

    first = answer(args.model, args.config)
    second = answer(args.model, args.config)
    print(f"First engine:  {first!r}")
    print(f"Second engine: {second!r}")
    assert first == second, "the tier must not change an answer"
    print("Both engines gave the same answer; `kvray status` shows the tokens that were found.")


if __name__ == "__main__":
    main()

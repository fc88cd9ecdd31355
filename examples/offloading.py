"""Host offloading: A, B, A, B on an engine whose own memory holds one of the two prompts only.

Without kvray each prompt pushes the other one out, and nothing is ever reused. With kvray the
blocks that the engine gave up are still in the node's shared memory.

    python examples/offloading.py
    python examples/offloading.py --model tiny
"""

import argparse
from pathlib import Path

from kvray.actors.tier.launch import local_tier
from kvray.config import load_config
from kvray.reference import KvConnectorConfig, Output, Replica

TOKENS_PER_BLOCK = 32
PROMPT_BLOCKS = 12
POOL_BLOCKS = PROMPT_BLOCKS + 1
"""One prompt and its answer."""

CONNECTOR = KvConnectorConfig(
    connector_module="kvray.connector",
    connector_scheduler_class="KvRayScheduler",
    connector_worker_class="KvRayWorker",
)


def make_prompt(first_token: int) -> list[int]:
    """Return token ids that fill their blocks and are like those of no other prompt."""
    num_tokens = PROMPT_BLOCKS * TOKENS_PER_BLOCK
    return [first_token + 7 * index % 200 for index in range(num_tokens)]


def play(connector: KvConnectorConfig | None, model: str, config: Path | None) -> list[Output]:
    """Ask one engine for A, B, A, B."""
    a, b = make_prompt(10), make_prompt(40)
    with Replica.start(
        "with kvray" if connector else "without kvray",
        env=environ_of(model, config),
        model=model,
        connector=connector,
        tokens_per_block=TOKENS_PER_BLOCK,
        num_blocks=POOL_BLOCKS,
    ) as engine:
        return [engine.generate(prompt, max_tokens=8) for prompt in (a, b, a, b)]


def environ_of(model: str, config: Path | None) -> dict[str, str]:
    """Return the variables of an engine's process."""
    environ = {"KVRAY_CONFIG": str(config.absolute())} if config else {}
    if model.startswith("tiny"):  # random weights, made in memory: no checkpoint identifies them
        environ["KVRAY_CONNECTOR__MODEL_KEY"] = model
    return environ


def main() -> None:
    """Play it twice, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a checkpoint's path")
    parser.add_argument("--config", type=Path, help="kvray.yaml (default: the one `kvray` takes)")
    args = parser.parse_args()

    without = play(None, args.model, args.config)
    # The tier that runs under this configuration's name, else one for the time of the block.
    with local_tier(load_config(args.config)):
        with_kvray = play(CONNECTOR, args.model, args.config)

    print("prompt   without kvray: reused, first token   with kvray: reused, first token")
    for name, plain, cached in zip("ABAB", without, with_kvray, strict=True):
        print(
            f"{name:6} {plain.reused_tokens:14} {plain.ttft_s * 1000:16.0f} ms"
            f" {cached.reused_tokens + cached.hit_tokens:16} {cached.ttft_s * 1000:13.0f} ms"
        )
        assert plain.token_ids == cached.token_ids, "the tier must not change an answer"
    assert all(output.reused_tokens == 0 for output in without)
    assert all(output.hit_tokens > 0 for output in with_kvray[2:])
    print("Every answer was the same, token for token.")


if __name__ == "__main__":
    main()

"""A prefix outlives its engine: a new engine process answers from what the old one has computed.

TensorRT-LLM's own example of a connector shows this with files; here the blocks stay in shared
memory and every engine of the node has them. Run it as it is, or start a tier with `kvray up`
first and run it twice: the second run finds the blocks of the first one.

    python examples/persistent_prefix.py
    python examples/persistent_prefix.py --model tiny
"""

import argparse
from pathlib import Path

from kvray.actors.tier.launch import local_tier
from kvray.config import load_config
from kvray.reference import KvConnectorConfig, Output, Replica

PROMPT = """\
The night shift of the harbour begins at ten. The pilot boat goes out first, and the cranes follow
as soon as the lines are fast. Containers for the railway are stacked on the northern quay, those
for the road on the southern one, and whatever nobody has ordered yet waits behind the warehouse.
The harbour master writes down every ship, every crane and every delay, and in the morning she
reads the list aloud to the day shift, so that nobody can say that he has not been told. If a ship
is late, its berth is given to the next one, and the late one has to wait outside of the mole until
another berth is free. This is not a punishment; it is the only rule that keeps the others moving.

Question: Where are the containers for the railway?
Answer:"""

# What goes into TensorRT-LLM's KvCacheConnectorConfig goes into the reference engine as well.
CONNECTOR = KvConnectorConfig(
    connector_module="kvray.connector",
    connector_scheduler_class="KvRayScheduler",
    connector_worker_class="KvRayWorker",
)


def answer(name: str, model: str, config: Path | None) -> Output:
    """Start an engine in a process of its own, ask it, and end it."""
    environ = environ_of(model, config)
    with Replica.start(name, env=environ, model=model, connector=CONNECTOR) as engine:
        output: Output = engine.generate(PROMPT, max_tokens=24)
        return output


def environ_of(model: str, config: Path | None) -> dict[str, str]:
    """Return the variables of an engine's process."""
    environ = {"KVRAY_CONFIG": str(config.absolute())} if config else {}
    if model.startswith("tiny"):  # random weights, made in memory: no checkpoint identifies them
        environ["KVRAY_CONNECTOR__MODEL_KEY"] = model
    return environ


def main() -> None:
    """Ask two engines, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a checkpoint's path")
    parser.add_argument("--config", type=Path, help="kvray.yaml (default: the one `kvray` takes)")
    args = parser.parse_args()

    # The tier that runs under this configuration's name, else one for the time of the block.
    with local_tier(load_config(args.config)):
        first = answer("first", args.model, args.config)
        second = answer("second", args.model, args.config)

    for name, output in (("first", first), ("second", second)):
        print(
            f"{name} engine: {output.hit_tokens} of {output.prompt_tokens} tokens from the tier,"
            f" first token after {output.ttft_s * 1000:.0f} ms, answer: {output.text!r}"
        )
    assert second.token_ids == first.token_ids, "the tier must not change an answer"
    assert second.hit_tokens > 0, "the second engine must find what the first one has computed"
    print("Both engines gave the same answer, token for token.")


if __name__ == "__main__":
    main()

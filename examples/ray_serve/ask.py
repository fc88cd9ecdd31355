"""A client of the example: the same question until two replicas have answered, with `openai`.

python examples/ray_serve/ask.py [--url http://127.0.0.1:8000/v1]

It waits until the application is up, and ends with status 1 if that takes too long.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files

from openai import APIError, OpenAI

HANDBOOK = files("kvray.lab.demo") / "handbook.txt"
CHARACTERS = 5000
QUESTION = "What fills the memory of an accelerator long before the weights do?"
TRIES_MAX, AT_ONCE = 5, 4
"""A question alone goes back to the replica that has just had it; of several some go elsewhere."""
START_TIMEOUT_S = 600.0
TELL_S = 15.0
"""Time between two lines while nothing is served."""
SAVED_S = 2.0
"""How long an engine's saves may take; they go on behind its answers."""


def ask(client: OpenAI, model: str) -> tuple[str, str, str]:
    """Ask; return the replica that answered, its answer, and a line on how that went."""
    began = time.monotonic()
    first_s, pieces, used = 0.0, [], None
    stream = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": HANDBOOK.read_text()[:CHARACTERS]},
            {"role": "user", "content": QUESTION},
        ],
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first_s = first_s or time.monotonic() - began
            pieces.append(chunk.choices[0].delta.content)
        used = chunk.usage or used
    replica = stream.response.headers["x-kvray-replica"]
    assert used is not None
    assert used.prompt_tokens_details is not None
    line = (
        f"{replica}: {first_s:.1f} s to the first text,"
        f" {used.prompt_tokens_details.cached_tokens:,} of {used.prompt_tokens:,} prompt tokens"
        " were cached"
    )
    return replica, "".join(pieces), line


def find_model(client: OpenAI) -> str:
    """Return the name of the served model, once it is served."""
    began = told = time.monotonic()
    while True:
        try:
            return client.models.list().data[0].id
        except APIError as error:
            now = time.monotonic()
            if now - began > START_TIMEOUT_S:
                sys.exit(f"Nothing is served at {client.base_url}: {error}; see `serve status`.")
            if now - told > TELL_S:
                told = now
                print(f"Waiting for {client.base_url}; `serve status` says what it does.")
        time.sleep(1)


def main() -> None:
    """Ask until two replicas have answered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key="none")
    model = find_model(client)
    one, first, line = ask(client, model)
    print(line)
    time.sleep(SAVED_S)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for _ in range(TRIES_MAX):
            asked = [threads.submit(ask, client, model) for _ in range(AT_ONCE)]
            found = {replica: told for replica, *told in (one.result() for one in asked)}
            assert {text for text, _ in found.values()} == {first}, "the tier must change no answer"
            if others := found.keys() - {one}:
                print(found[others.pop()][1])
                break
        else:
            sys.exit(f"{one} gave every answer; is there another replica? See `serve status`.")
    print(f"Both said: {first.strip()}")


if __name__ == "__main__":
    main()

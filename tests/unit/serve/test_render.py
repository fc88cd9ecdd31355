"""The prompt of a request, as the engine sees it: forms, refusals, and pieces that are kept."""

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("transformers")

from kvray.reference.checkpoint import find_smollm2
from kvray.reference.tokenizer import ByteTokenizer, import_transformers
from kvray.serve import Settings
from kvray.serve.render import Prompts, Texts, load_prompts

TINY = load_prompts(Settings(model="tiny"), engine="reference")
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def text_of(path: str, **asked: Any) -> str:
    """Return the prompt of a request to the tiny model, whose tokens are bytes."""
    return ByteTokenizer().decode(TINY.hint(path, json.dumps(asked).encode()).tokens.tolist())


def test_every_form_of_a_chat_is_one_prompt_with_a_line_a_message_without_a_template():
    lines, brief = "system: Be brief.\nuser: Hi\nassistant:", "Be brief."
    assert text_of("/v1/chat/completions", messages=CHAT) == lines
    parts = [
        {"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in CHAT
    ]
    assert text_of("/v1/chat/completions", messages=parts) == lines
    said = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    for asked in (said, "Hi"):
        assert text_of("/v1/responses", input=asked, instructions=brief) == lines
    for system in ([{"type": "text", "text": brief}], brief):
        assert text_of("/v1/messages", messages=CHAT[1:], system=system) == lines


def test_a_completions_prompt_is_text_token_ids_or_the_first_of_several_and_its_salt_goes_along():
    tokens = ByteTokenizer().encode("one")
    for prompt in ("one", tokens, [tokens, [1, 2]], ["one", "two"]):
        assert text_of("/v1/completions", prompt=prompt) == "one"
    hint = TINY.hint("/v1/completions", b'{"prompt": "one", "cache_salt": "acme/1"}')
    assert (hint.salt, hint.is_stream) == ("acme/1", False)
    assert hint.tokens.dtype == np.int32


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
BROKEN = (b"", b"{", b"[]", b"[" * 100_000)
NO_PROMPTS = (b'""', b"{}", b"[1099511627776]", b'"\\ud800"')
LEFT = [
    *(("completions", body) for body in BROKEN),
    *(("completions", b'{"prompt": %s}' % prompt) for prompt in NO_PROMPTS),
    ("chat/completions", b'{"messages": [{}]}'),
    ("chat/completions", json.dumps({"messages": IMAGE}).encode()),
    ("responses", b'{"input": "a", "previous_response_id": "r"}'),
    ("embeddings", b'{"input": "a"}'),
]


@pytest.mark.parametrize(("path", "body"), LEFT)
def test_what_cannot_be_rendered_is_left_to_the_engine(path, body):
    assert TINY.hint(f"/v1/{path}", body) is None


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}:{{ c.function.arguments.at }}]"
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}{{ tools | length if tools else '' }}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ mood or '' }}"
)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    """The tokenizer of SmolLM2, with a template that shows what it was given."""
    made = import_transformers().AutoTokenizer.from_pretrained(str(find_smollm2()))
    made.chat_template = TEMPLATE
    return made


def rendered(tokenizer: Any, path: str, *, prompts: Any = None, **asked: Any) -> str:
    prompts = prompts or Prompts(Texts(tokenizer).encode, tokenizer, adds_special=True)
    hint = prompts.hint(path, json.dumps(asked).encode())
    return str(tokenizer.decode(hint.tokens.tolist()))


@pytest.mark.smollm2
@pytest.mark.parametrize("is_file", [True, False])
def test_an_engines_own_template_is_rendered(smollm2, tmp_path, is_file):
    template = "{% for one in messages %}<{{ one.content }}>{% endfor %}"
    (file := tmp_path / "t.jinja").write_text(template)
    options = {"chat_template": str(file) if is_file else template}
    settings = Settings(engine="vllm", model=str(find_smollm2()), engine_options=options)
    prompts = load_prompts(settings, engine="vllm")
    said = rendered(smollm2, "/v1/chat/completions", prompts=prompts, messages=CHAT)
    assert said == "<Be brief.><Hi>"


@pytest.mark.smollm2
def test_a_template_gets_tools_calls_and_key_words(smollm2):
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 7}'}}
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "seven"},
    ]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    head = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n[look:7]<|im_end|>\n<|im_start|>tool\nseven<|im_end|>\n"
    )
    mood = {"chat_template_kwargs": {"mood": "calm"}}
    asked = {"messages": messages, "tools": [tool]}
    path = "/v1/chat/completions"
    assert rendered(smollm2, path, **asked) == head + "1<|im_start|>assistant\n"
    assert rendered(smollm2, path, **asked, **mood) == head + "1<|im_start|>assistant\ncalm"
    assert rendered(smollm2, path, messages=messages, add_generation_prompt=False) == head
    own = json.dumps({**asked, "chat_template_kwargs": {"chat_template": "own"}}).encode()
    prompts = Prompts(Texts(smollm2).encode, smollm2, adds_special=True)
    assert prompts.hint(path, own) is None, "the engine alone runs a client's template"
    used = {"type": "tool_use", "id": "1", "name": "look", "input": {"at": 7}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "seven"}
    theirs = [
        CHAT[1],
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    tools = [{"name": "look", "input_schema": {}}]
    said = rendered(smollm2, "/v1/messages", messages=theirs, system="Be brief.", tools=tools)
    assert said == head + "1<|im_start|>assistant\n"
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"at": 7}'},
        {"type": "function_call_output", "call_id": "1", "output": "seven"},
    ]
    asked = {"instructions": "Be brief.", "tools": [{"type": "function", "name": "look"}]}
    assert rendered(smollm2, "/v1/responses", input=items, **asked) == said


@pytest.mark.smollm2
def test_a_turn_computes_only_what_it_adds_and_pieces_are_the_whole(smollm2):
    texts = Texts(smollm2)
    said = "naïve \N{PARTY POPPER} " * 20
    turns = [f"<|im_start|>user\nTurn {at}: {said}<|im_end|>\n" for at in range(5)]
    whole = "".join(turns)
    expected = smollm2.encode(whole, add_special_tokens=False)
    assert texts.encode(whole).tolist() == expected
    asked: list[str] = []
    encode = smollm2.encode
    try:
        smollm2.encode = lambda text, **options: asked.append(text) or encode(text, **options)
        more = whole + "<|im_start|>assistant\n"
        assert texts.encode(more).tolist()[: len(expected)] == expected
    finally:
        del smollm2.encode
    assert max(map(len, asked)) < 64, "what is long is kept"


@pytest.mark.smollm2
def test_what_is_kept_is_bounded(smollm2, monkeypatch):
    monkeypatch.setattr("kvray.serve.render._CACHED_CHARACTERS_MAX", 500)
    texts = Texts(smollm2)
    for at in range(20):
        texts.encode(f"<|im_start|>{at}" + "word " * 30)
    assert texts._num_characters <= 500
    assert sum(map(len, texts._kept)) == texts._num_characters


def test_a_tokenizer_that_joins_pieces_otherwise_gets_whole_texts():
    class Joining:
        all_special_tokens = ("<s>",)

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [len(text), *text.encode()]

    assert Texts(Joining()).encode("<s>a<s>b").tolist()[0] == len("<s>a<s>b")

"""The same with real weights and real text."""

import pytest

from kvray.lab.reference.engine import ReferenceEngine
from tests.engine.fake_connector import CONFIG, State

TEXT = """The harbour of the old town lies between two rocky hills. In the morning the fishing
boats come back with their catch, and the gulls follow them as far as the market. Behind the
market stands the house of the harbour master, who writes down the name of every ship, the hour
of its arrival and the goods that it carries. """


@pytest.mark.long
@pytest.mark.smollm2
def test_real_model_gives_the_same_text_from_loaded_blocks(fake: State) -> None:
    def engine(connector: object = None) -> ReferenceEngine:
        return ReferenceEngine("smollm2", num_blocks=32, connector=connector, poison=True)

    with engine() as alone:
        tokens = alone.tokenizer.encode(TEXT * 5)
        prompts = [tokens[:288], tokens[1:290]]  # an aligned one and one that is not
        expected = [alone.generate(prompt, max_tokens=12) for prompt in prompts]
        assert "Paris" in alone.generate("The capital of France is", max_tokens=4).text
    with engine(CONFIG) as first:
        stored = [first.generate(prompt, max_tokens=12) for prompt in prompts]
    with engine(CONFIG) as second:
        loaded = [second.generate(prompt, max_tokens=12) for prompt in prompts]
    assert [output.token_ids for output in stored] == [output.token_ids for output in expected]
    assert [output.text for output in loaded] == [output.text for output in expected]
    assert [output.hit_tokens for output in stored] == [0, 0]
    assert [output.hit_tokens for output in loaded] == [256, 288]

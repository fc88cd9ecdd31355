"""The same with real weights and real text."""

import pytest

from kvray.reference.engine import ReferenceEngine
from tests.engine.fake_connector import CONFIG, State

TEXT = """The harbour of the old town lies between two rocky hills. In the morning the fishing
boats come back with their catch, and the gulls follow them as far as the market. Behind the
market stands the house of the harbour master, who writes down the name of every ship, the hour
of its arrival and the goods that it carries. """


@pytest.mark.smollm2
@pytest.mark.parametrize("trim", [0, 1])
def test_real_model_gives_the_same_text_from_loaded_blocks(fake: State, trim: int) -> None:
    def engine(connector: object = None) -> ReferenceEngine:
        return ReferenceEngine("smollm2", num_blocks=32, connector=connector, poison=True)

    with engine() as alone:
        tokens = alone.tokenizer.encode(TEXT * 5)[: 288 + trim]
        expected = alone.generate(tokens, max_tokens=12)
        facts = alone.generate("The capital of France is", max_tokens=4)
    assert "Paris" in facts.text
    with engine(CONFIG) as first:
        assert first.generate(tokens, max_tokens=12).token_ids == expected.token_ids
    with engine(CONFIG) as second:
        output = second.generate(tokens, max_tokens=12)
    assert output.token_ids == expected.token_ids
    assert output.text == expected.text
    assert output.hit_tokens == (288 + trim - 1) // 32 * 32
    assert output.ttft_s < expected.ttft_s

"""The prompts of the demo: a handbook, each time from another chapter on, and a question."""

from importlib.resources import files

from kvray.reference.tokenizer import Tokenizer

TOKENS_PER_BLOCK = 32
LONG_BLOCKS = 48
"""Blocks of the long prompt, which fills them exactly: the last token is the last of a block."""
UNALIGNED_BLOCKS = 22
UNALIGNED_TOKENS = 13
"""Tokens of the other long prompt after its last full block."""
SYSTEM_BLOCKS = 16
OFFLOAD_BLOCKS = 18
_OFFLOAD_TOKENS = 9

LONG, UNALIGNED = "long", "unaligned"
SAME_SYSTEM = ("question 1", "question 2", "question 3")
"""Only these prompts begin with the same block."""
OFFLOAD_A, OFFLOAD_B = "A", "B"

_CHAT = (
    "<|im_start|>system\nAnswer from this handbook in one sentence.\n\n",
    "<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
)
"""The text before the document, and the text after it with the question."""
_PLAIN = ("", "\n\nQuestion: {question}\nAnswer:")

Prompts = dict[str, tuple[int, ...]]
"""Name -> token ids."""


def make_prompts(tokenizer: Tokenizer) -> Prompts:
    """Cut the prompts to their exact numbers of tokens."""
    # SmolLM2's tokenizer knows the marks of a chat; others get plain text.
    begin, end = _CHAT if len(tokenizer.encode("<|im_start|>")) == 1 else _PLAIN

    def make(chapter: int, question: str, num_blocks: int, more: int | None = 0) -> tuple[int, ...]:
        """Return a prompt with `more` tokens after its full blocks; None: with all the question."""
        asked = tokenizer.encode(end.format(question=question))
        num_tokens = num_blocks * TOKENS_PER_BLOCK + (len(asked) if more is None else more)
        document = tokenizer.encode(begin + _handbook_from(chapter))[: num_tokens - len(asked)]
        assert len(document) + len(asked) == num_tokens, "the handbook is long enough"
        return (*document, *asked)

    failures = "Which failures are unfriendly, and why?"
    full_cache = "What is the worst answer to a full cache?"
    one, two, three = SAME_SYSTEM
    return {
        LONG: make(0, "What is the hard part of serving language models?", LONG_BLOCKS),
        UNALIGNED: make(3, full_cache, UNALIGNED_BLOCKS, UNALIGNED_TOKENS),
        one: make(2, "Why is a replica slow after a restart?", SYSTEM_BLOCKS, None),
        two: make(2, "What is to be done before a process is stopped?", SYSTEM_BLOCKS, None),
        three: make(2, "What does the fingerprint cover?", SYSTEM_BLOCKS, None),
        OFFLOAD_A: make(4, failures, OFFLOAD_BLOCKS, _OFFLOAD_TOKENS),
        OFFLOAD_B: make(1, "Which two clocks do users feel?", OFFLOAD_BLOCKS, _OFFLOAD_TOKENS),
    }


def shareable_tokens(num_tokens: int) -> int:
    """Return how many tokens of a prompt another engine can take from the tier.

    Full blocks only, and never the whole prompt: the engine computes at least one token.
    """
    return (num_tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK


def _handbook_from(chapter: int) -> str:
    """Return the handbook from a chapter's title on, with the chapters before it at the end."""
    text = (files("kvray.lab.demo") / "handbook.txt").read_text(encoding="utf-8")
    paragraphs = text.strip().split("\n\n")
    starts = [index for index, paragraph in enumerate(paragraphs) if len(paragraph) < 60]
    start = starts[chapter]
    return "\n\n".join(paragraphs[start:] + paragraphs[:start])

"""The prompts of the demo: a handbook, each time from another chapter on, and a question."""

from dataclasses import dataclass
from importlib.resources import files

from kvray.lab.reference.tokenizer import Tokenizer

LONG_BLOCKS = 48
"""Blocks of the long prompt, which fills them exactly: the last token is the last of a block."""
UNALIGNED_BLOCKS = 22
UNALIGNED_TOKENS = 13
"""Tokens of the other long prompt after its last full block."""
SYSTEM_BLOCKS = 16
OFFLOAD_BLOCKS = 18
OFFLOAD_TOKENS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as the engine takes it."""

    name: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """All prompts; only those of `same_system` begin with the same block."""

    long: Prompt
    unaligned: Prompt
    same_system: tuple[Prompt, ...]
    offload_a: Prompt
    offload_b: Prompt

    def all(self) -> tuple[Prompt, ...]:
        """Return each prompt once."""
        return (self.long, self.unaligned, *self.same_system, self.offload_a, self.offload_b)


def make_prompts(tokenizer: Tokenizer, *, tokens_per_block: int) -> Prompts:
    """Cut the prompts to their exact numbers of tokens."""
    # SmolLM2's tokenizer knows the marks of a chat; others get plain text.
    begin, end = _CHAT if len(tokenizer.encode("<|im_start|>")) == 1 else _PLAIN

    def make(name: str, chapter: int, question: str, num_blocks: int, num_more: int = 0) -> Prompt:
        asked = tokenizer.encode(end.format(question=question))
        num_tokens = num_blocks * tokens_per_block + num_more
        document = tokenizer.encode(begin + _handbook_from(chapter))[: num_tokens - len(asked)]
        assert len(document) + len(asked) == num_tokens, "the handbook is long enough"
        return Prompt(name=name, token_ids=(*document, *asked))

    def make_same(name: str, question: str) -> Prompt:
        asked = tokenizer.encode(end.format(question=question))
        return make(name, 2, question, SYSTEM_BLOCKS, len(asked))

    full_cache = "What is the worst answer to a full cache?"
    failures = "Which failures are unfriendly, and why?"
    return Prompts(
        long=make("long", 0, "What is the hard part of serving language models?", LONG_BLOCKS),
        unaligned=make("unaligned", 3, full_cache, UNALIGNED_BLOCKS, UNALIGNED_TOKENS),
        same_system=(
            make_same("question 1", "Why is a replica slow after a restart?"),
            make_same("question 2", "What is to be done before a process is stopped?"),
            make_same("question 3", "What does the fingerprint cover?"),
        ),
        offload_a=make("A", 4, failures, OFFLOAD_BLOCKS, OFFLOAD_TOKENS),
        offload_b=make("B", 1, "Which two clocks do users feel?", OFFLOAD_BLOCKS, OFFLOAD_TOKENS),
    )


_CHAT = (
    "<|im_start|>system\nAnswer from this handbook in one sentence.\n\n",
    "<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
)
"""The text before the document, and the text after it with the question."""
_PLAIN = ("", "\n\nQuestion: {question}\nAnswer:")


def _handbook_from(chapter: int) -> str:
    """Return the handbook from a chapter's title on, with the chapters before it at the end."""
    text = (files("kvray.lab.demo") / "handbook.txt").read_text(encoding="utf-8")
    paragraphs = text.strip().split("\n\n")
    starts = [index for index, paragraph in enumerate(paragraphs) if len(paragraph) < 60]
    start = starts[chapter]
    return "\n\n".join(paragraphs[start:] + paragraphs[:start])

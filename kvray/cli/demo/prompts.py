"""The texts that the demo asks about: chapters of a handbook, each prompt from another one on."""

from dataclasses import dataclass
from importlib.resources import files

from kvray.reference.tokenizer import Tokenizer

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
    """Everything that is asked; no two begin with the same block unless they are meant to."""

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
    form = _form(tokenizer)

    def make(name: str, chapter: int, question: str, num_tokens: int) -> Prompt:
        end = tokenizer.encode(form.end.format(question=question))
        document = tokenizer.encode(form.begin + _handbook_from(chapter))
        token_ids = (*document[: num_tokens - len(end)], *end)
        assert len(token_ids) == num_tokens, "the handbook is long enough"
        return Prompt(name=name, token_ids=token_ids)

    def make_same(name: str, question: str) -> Prompt:
        system = tokenizer.encode(form.begin + _handbook_from(2))
        end = tokenizer.encode(form.end.format(question=question))
        return Prompt(name=name, token_ids=(*system[: SYSTEM_BLOCKS * tokens_per_block], *end))

    long_tokens = LONG_BLOCKS * tokens_per_block
    unaligned_tokens = UNALIGNED_BLOCKS * tokens_per_block + UNALIGNED_TOKENS
    offload_tokens = OFFLOAD_BLOCKS * tokens_per_block + OFFLOAD_TOKENS
    return Prompts(
        long=make("long", 0, "What is the hard part of serving language models?", long_tokens),
        unaligned=make(
            "unaligned", 3, "What is the worst answer to a full cache?", unaligned_tokens
        ),
        same_system=(
            make_same("question 1", "Why is a replica slow after a restart?"),
            make_same("question 2", "What is to be done before a process is stopped?"),
            make_same("question 3", "What does the fingerprint cover?"),
        ),
        offload_a=make("A", 4, "Which failures are unfriendly, and why?", offload_tokens),
        offload_b=make("B", 1, "Which two clocks do users feel?", offload_tokens),
    )


@dataclass(frozen=True, slots=True)
class _Form:
    """What stands before the document, and after it with the question in it."""

    begin: str
    end: str


_CHAT = _Form(
    begin="<|im_start|>system\nAnswer from this handbook in one sentence.\n\n",
    end="<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
)
_PLAIN = _Form(begin="", end="\n\nQuestion: {question}\nAnswer:")


def _form(tokenizer: Tokenizer) -> _Form:
    """Return the form of a chat if the tokenizer knows its marks, as SmolLM2's does."""
    return _CHAT if len(tokenizer.encode("<|im_start|>")) == 1 else _PLAIN


def _handbook_from(chapter: int) -> str:
    """Return the handbook from a chapter's title on, with the chapters before it at the end."""
    text = (files("kvray.cli.demo") / "handbook.txt").read_text(encoding="utf-8")
    paragraphs = text.strip().split("\n\n")
    starts = [index for index, paragraph in enumerate(paragraphs) if len(paragraph) < 60]
    start = starts[chapter]
    return "\n\n".join(paragraphs[start:] + paragraphs[:start])

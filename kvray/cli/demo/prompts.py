"""The texts that the demo asks about: chapters of a handbook, each prompt from another one on."""

from dataclasses import dataclass
from importlib.resources import files

from kvray.reference.tokenizer import Tokenizer

LONG_BLOCKS = 48
"""Blocks of the long prompt, which fills them exactly: the last token is the last of a block."""
UNALIGNED_BLOCKS = 30
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

    def make(name: str, chapter: int, question: str, num_tokens: int) -> Prompt:
        end = tokenizer.encode(f"\n\nQuestion: {question}\nAnswer:")
        document = tokenizer.encode(_handbook_from(chapter))
        token_ids = (*document[: num_tokens - len(end)], *end)
        assert len(token_ids) == num_tokens, "the handbook is long enough"
        return Prompt(name=name, token_ids=token_ids)

    system = tuple(tokenizer.encode(_handbook_from(2))[: SYSTEM_BLOCKS * tokens_per_block])

    def with_system(name: str, question: str) -> Prompt:
        end = tokenizer.encode(f"\n\nQuestion: {question}\nAnswer:")
        return Prompt(name=name, token_ids=(*system, *end))

    offload_tokens = OFFLOAD_BLOCKS * tokens_per_block + OFFLOAD_TOKENS
    return Prompts(
        long=make(
            "long", 0, "What fills the memory of an accelerator?", LONG_BLOCKS * tokens_per_block
        ),
        unaligned=make(
            "unaligned",
            3,
            "What should be given up first when memory runs out?",
            UNALIGNED_BLOCKS * tokens_per_block + UNALIGNED_TOKENS,
        ),
        same_system=(
            with_system("first question", "Why is a replica slow after a restart?"),
            with_system("second question", "What is done before a process is stopped?"),
            with_system("third question", "What does a fingerprint protect from?"),
        ),
        offload_a=make("A", 4, "Which failure is the friendly one?", offload_tokens),
        offload_b=make("B", 1, "Which two clocks do users feel?", offload_tokens),
    )


def _handbook_from(chapter: int) -> str:
    """Return the handbook from a chapter's title on, with the chapters before it at the end."""
    text = (files("kvray.cli.demo") / "handbook.txt").read_text(encoding="utf-8")
    paragraphs = text.strip().split("\n\n")
    starts = [index for index, paragraph in enumerate(paragraphs) if len(paragraph) < 60]
    start = starts[chapter]
    return "\n\n".join(paragraphs[start:] + paragraphs[:start])

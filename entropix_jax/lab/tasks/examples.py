"""Prompts that show solved examples before the question."""

from collections.abc import Sequence

from entropix_jax.lab.tasks.task import Prompt


def ask_after(examples: Sequence[tuple[str, str]], question: str, *, chat: bool) -> Prompt:
    """The questions and answers of the examples and then the question, as turns of a chat or as
    plain text, in which a new question begins with a line `Question:`."""
    if not chat:
        blocks = [f"Question: {asked}\nAnswer: {told}" for asked, told in examples]
        return "\n\n".join([*blocks, f"Question: {question}\nAnswer:"])
    turns = [
        {"role": role, "content": content}
        for example in examples
        for role, content in zip(("user", "assistant"), example, strict=True)
    ]
    return (*turns, {"role": "user", "content": question})

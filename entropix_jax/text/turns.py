"""End tokens of a chat's turns, and stop strings that are control tokens."""

from collections.abc import Iterable

from entropix_jax.errors import UserError
from entropix_jax.text.tokenizer import Tokenizer

# Control tokens that end a turn wherever a vocabulary has them, as in llama.cpp.
TURN_ENDS = """
    <|eot_id|> <|im_end|> <|eom_id|> <|end|> <end_of_turn> <end_of_utterance>
""".split()
_QUESTION, _ANSWER = "the-question", "the-answer"  # contents that no template changes


def turn_end_id(tokenizer: Tokenizer) -> int | None:
    """Returns the control token that ends an assistant's turn in the chat template, or None.

    It is the first control token after the answer to a question. A template may end a turn only
    when the next one begins, so a second question is tried, too.
    """
    if tokenizer.chat_template is None:
        return None
    question = {"role": "user", "content": _QUESTION}
    answer = {"role": "assistant", "content": _ANSWER}
    for messages in ([question, answer], [question, answer, question]):
        try:
            text = tokenizer.render_chat(messages, add_generation_prompt=False)
        except UserError:  # a template may refuse a chat without a system message or with two turns
            return None
        _, found, after = text.rpartition(_ANSWER)
        ids = tokenizer.encode_within(after) if found else []
        if (end := next((i for i in ids if i in tokenizer.special_ids), None)) is not None:
            return end
    return None


def stop_ids(tokenizer: Tokenizer, stops: Iterable[str]) -> list[int]:
    """Returns the ids of the stop strings that are control tokens: those are not part of a text, so
    only their id can end a row."""
    ids = map(tokenizer.token_id, stops)
    return [i for i in ids if i is not None and i in tokenizer.special_ids]

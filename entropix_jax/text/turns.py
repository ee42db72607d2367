"""End tokens of a chat's turns, and stop strings that are control tokens."""

from collections.abc import Iterable, Sequence

from entropix_jax.errors import UserError
from entropix_jax.text.tokenizer import Tokenizer

_QUESTION, _ANSWER = "the-question", "the-answer"  # contents that no template changes


def turn_end_id(tokenizer: Tokenizer, eos_ids: Sequence[int]) -> int | None:
    """Returns the control token that ends an assistant's turn in the chat template, or None.

    It is the first control token after the answer to a question. A template may end a turn only
    when the next one begins, so a second question is tried, too. A token that begins a turn does
    not end one, unless it is one of the model's end tokens.
    """
    special = tokenizer.special_ids
    starting = special - {*eos_ids, tokenizer.bos_id}
    if tokenizer.chat_template is None:
        return None
    question = {"role": "user", "content": _QUESTION}
    answer = {"role": "assistant", "content": _ANSWER}
    for messages in ([question, answer], [question, answer, question]):
        try:
            text = tokenizer.render_chat(messages, add_generation_prompt=False)
        except UserError:  # a template may refuse a chat without a system message or with two turns
            return None
        before, (_, found, after) = text.partition(_QUESTION)[0], text.rpartition(_ANSWER)
        starts = [i for i in tokenizer.encode_within(before) if i in starting]
        ids = tokenizer.encode_within(after) if found else []
        if (end := next((i for i in ids if i in special), None)) is not None:
            begins = len(messages) > 2 and end in (*starts[:1], *starts[-1:])
            return None if begins else end
    return None


def stop_ids(tokenizer: Tokenizer, stops: Iterable[str]) -> list[int]:
    """Returns the ids of the stop strings that are control tokens: those are not part of a text, so
    only their id can end a row."""
    ids = map(tokenizer.token_id, stops)
    return [i for i in ids if i is not None and i in tokenizer.special_ids]

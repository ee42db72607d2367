"""Intents of continuations, and their entropy."""

from __future__ import annotations

import numpy as np
import pytest

from entropix_jax.text.intents import intent_entropy, may_ask, read_outcome


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (" Cork.", "cork"),
        (" in the  Cork!\n", "in cork"),
        (" An apple, a pear", "apple pear"),
        (" the", ""),
        ("", ""),
        (" It costs 3 or $1,250.50.", "1250.5"),
        (" 7.0 apples", "7"),
        (" Straße", "straße"),
    ],
)
def test_outcome_of_a_text(text: str, outcome: str) -> None:
    assert read_outcome(text) == outcome


@pytest.mark.parametrize("counts", [(8,), (4, 4), (5, 2, 1), (1,) * 8])
def test_entropy_over_intents(counts: tuple[int, ...]) -> None:
    """Texts that differ in form only have one intent."""
    forms = " {}.", " The {}", "{}!"
    texts = [forms[i % 3].format("xyzuvwpq"[k]) for k, n in enumerate(counts) for i in range(n)]
    p = np.array(counts) / sum(counts)
    assert intent_entropy(texts) == pytest.approx(-np.sum(p * np.log2(p)), abs=1e-12)


def test_entropy_without_texts_is_0() -> None:
    assert intent_entropy([]) == 0


def test_a_user_who_has_replied_is_not_asked_again() -> None:
    talk = [
        {"role": "user", "content": "Where does she live?"},
        {"role": "assistant", "content": " One question: do you mean Anna or Rita?\n"},
        {"role": "user", "content": "Rita."},
    ]
    assert may_ask(talk[:1])
    assert not may_ask(talk)
    assert not may_ask([*talk, {"role": "assistant", "content": "She "}])
    assert may_ask([talk[0], {"role": "assistant", "content": "She?"}])
    quoted = {"role": "assistant", "content": '"Which one?"'}
    assert not may_ask([talk[0], quoted, talk[2]])
    answer = {"role": "assistant", "content": "Rita lives in Cork."}
    assert may_ask([*talk, answer, talk[0]])

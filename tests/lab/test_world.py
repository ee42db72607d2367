"""The generator of the tiny model's text, and the model's divergence from it."""

import itertools
import json
import math
import re
from pathlib import Path
from random import Random

import jax
import jax.numpy as jnp
import jinja2
import numpy as np
import pandas as pd
import pytest
from tiny.corpus import compare, encode_row, terminal_ids, write_row
from tiny.tokenizer import build_tokenizer, tokenizer_config, tokenizer_json
from tokenizers import Tokenizer

from entropix_jax.lab.world import lexicon
from entropix_jax.lab.world.documents import document, stream
from entropix_jax.lab.world.facts import WORLD_SEED, create
from entropix_jax.lab.world.grammar import (
    Choice,
    Document,
    ImpossibleText,
    certain,
    expected,
    replay,
    sample,
    uniform,
    weigh,
    weighted,
)
from entropix_jax.lab.world.problems import (
    FIRST_OPERANDS,
    START,
    Sum,
    pose_sum,
    pose_word_problem,
    problems,
)
from entropix_jax.model.cache import init_cache
from entropix_jax.model.config_file import load_model_config
from entropix_jax.model.llama import forward, unembed
from tests.support.models import load_params

TINY = Path(__file__).parents[2] / "weights" / "tiny"
WORLD = create(WORLD_SEED)
IDS = terminal_ids(build_tokenizer())


@pytest.fixture(scope="module")
def row() -> list:
    return write_row(WORLD, Random(1), 60_000)


def text_of(positions) -> str:
    return "".join(position.terminal for position in positions)


# Choices.


@pytest.mark.parametrize(
    ("choice", "entropy", "varentropy"),
    [
        (certain("k", "a"), 0.0, 0.0),
        (uniform("k", [f" {n}" for n in range(64)]), 6.0, 0.0),
        (weighted("k", {"a": 99, "b": 1, "c": 0}), 0.080793, 0.435089),
        (expected("k", "a", 0.5, [f" {n}" for n in range(64)]), 4.0, 9.0),
    ],
)
def test_entropies_match_the_check_values(choice: Choice, entropy: float, varentropy: float):
    assert choice.entropy == pytest.approx(entropy, abs=1e-6)
    assert choice.varentropy == pytest.approx(varentropy, abs=1e-6)


def test_hesitation_restates_and_ends_in_the_same_choice():
    def toast() -> Document:
        yield from weigh(uniform("k", [" Anna", " Bob"]), restate=" Hello,")

    upcoming = replay(toast(), [" Wait", "...", " Hello", ","])
    assert upcoming is not None
    assert upcoming.probabilities == (0.5, 0.5)
    assert replay(toast(), [" ...", " Anna"]) is None
    with pytest.raises(ImpossibleText):
        replay(toast(), [" ...", " ..."])


# The truth.


def test_replay_recovers_the_distributions(row: list):
    said = lexicon.split_terminals(text_of(row[:600]))
    for drawn, place in zip(row[::7], range(0, 600, 7), strict=False):
        upcoming = replay(stream(WORLD), said[:place])
        assert upcoming is not None
        assert (said[place], upcoming.kind) == (drawn.terminal, drawn.choice.kind)
        assert upcoming.terminals == drawn.choice.terminals
        assert upcoming.probabilities == drawn.choice.probabilities


def test_replay_names_the_first_impossible_terminal():
    person = WORLD.people["Anna"]
    wrong = next(town for town in lexicon.TOWNS if town != person.town)
    terminals = lexicon.split_terminals(f"{lexicon.BEGIN}Anna lives in {wrong}.")
    with pytest.raises(ImpossibleText, match=rf"terminal 4, ' {wrong}', is impossible") as caught:
        replay(document(WORLD), terminals)
    assert caught.value.index == 4
    written = [position.terminal for position in sample(document(WORLD), Random(0))]
    assert replay(document(WORLD), written) is None
    with pytest.raises(ImpossibleText):
        replay(document(WORLD), [*written, " Anna"])


def test_distributions_are_valid_and_sampled(row: list):
    """The mean of -log2 p over sampled terminals is the entropy, within four standard errors."""
    known = set(lexicon.TERMINALS)
    for choice in {id(position.choice): position.choice for position in row}.values():
        assert math.fsum(choice.probabilities) == pytest.approx(1.0, abs=1e-12)
        assert min(choice.probabilities) > 0
        assert len(set(choice.terminals)) == len(choice.terminals)
        assert known.issuperset(choice.terminals)
        assert choice.kind != "fact" or choice.entropy == 0
    drawn = [p.choice.probabilities[p.choice.terminals.index(p.terminal)] for p in row]
    rate = np.mean([position.choice.entropy for position in row])
    variance = np.mean([position.choice.varentropy for position in row])
    error = 4 * math.sqrt(variance / len(row))
    assert -np.log2(drawn).mean() == pytest.approx(rate, abs=error)


# Problems.


def test_training_text_never_lacks_an_operand():
    """Every reachable first operand, sign and amount leaves a training sum."""

    def walk(make) -> None:
        """Follows all signs and numbers of a part, and the first of every other choice."""
        todo: list[list[str]] = [[]]
        while todo:
            prefix = todo.pop()
            choice = replay(make(), prefix)
            if choice is not None:
                all_of_them = choice.kind in ("number", "fork")
                branches = choice.terminals if all_of_them else choice.terminals[:1]
                todo.extend([*prefix, terminal] for terminal in branches)

    for first in FIRST_OPERANDS:
        walk(lambda first=first: pose_sum(int(first), "train"))
    for start in (START[0], START[-1]):
        walk(lambda start=start: pose_word_problem("Anna", start, "train"))


@pytest.mark.parametrize("kind", ["sum", "word"])
def test_problems_of_different_splits_are_disjoint_and_stable(kind):
    posed = {split: problems(kind, split, 120, seed=0) for split in ("train", "tuning", "test")}
    last_sums = {split: {p.steps[-1] for p in posed[split]} for split in posed}
    for one, other in itertools.combinations(last_sums.values(), 2):
        assert not one & other
    assert posed["test"] == problems(kind, "test", 120, seed=0)
    assert posed["test"] != problems(kind, "test", 120, seed=1)
    for problem in posed["test"]:
        assert problem.steps[-1].split == "test"
        assert all(step.split == "train" for step in problem.steps[:-1])


def test_sums_of_training_text_are_right_and_never_held_out(row: list):
    found = re.findall(r"(\d+) ([+-]) (\d+)(?: = (\d+)\.)?", text_of(row))
    assert len(found) > 500
    assert {Sum(int(a), sign, int(b)).split for a, sign, b, _ in found} == {"train"}
    assert all(Sum(int(a), sign, int(b)).value == int(c) for a, sign, b, c in found if c)


def test_answers_follow_from_the_problems_text():
    for problem in problems("word", "tuning", 50, seed=0):
        numbers = [int(word) for word in problem.prompt.split() if word.isdigit()]
        held = numbers[0]
        for sentence in problem.prompt.split(". ")[1:3]:
            words = sentence.split()
            amount = next(int(word) for word in words if word.isdigit())
            gained = words[1] in ("buys", "finds") or (
                words[1] == "gives" and words[0] != problem.prompt.split()[0]
            )
            held += amount if gained else -amount
        assert problem.answer == held
    for problem in problems("sum", "tuning", 50, seed=0):
        assert problem.answer == eval(problem.prompt.removesuffix(" ="))  # digits and a sign


# The tokenizer.


def test_each_terminal_is_one_token(row: list):
    tokenizer, text = Tokenizer.from_str(tokenizer_json()), text_of(row)
    encoded = tokenizer.encode(text, add_special_tokens=False).ids
    assert encoded == encode_row(row, IDS)
    assert tokenizer.decode(encoded, skip_special_tokens=False) == text


def test_the_built_tokenizer_equals_the_shipped_one():
    assert (TINY / "tokenizer.json").read_text(encoding="utf-8") == tokenizer_json()
    shipped = json.loads((TINY / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert shipped == tokenizer_config(load_model_config(TINY).max_positions)


def test_the_chat_template_writes_chats_of_the_grammar():
    template = jinja2.Template(tokenizer_config(1)["chat_template"])
    reply = f"Anna lives in {WORLD.people['Anna'].town}."
    for messages, following in (
        ([("user", " Where does Anna live? "), ("assistant", reply)], {lexicon.END}),
        ([("user", "How are you?")], {"I"}),
    ):
        text = template.render(
            bos_token=lexicon.BEGIN,
            messages=[{"role": role, "content": content} for role, content in messages],
            add_generation_prompt=len(messages) == 1,
        )
        upcoming = replay(document(WORLD), lexicon.split_terminals(text))
        assert upcoming is not None
        assert following <= {*upcoming.terminals}


# Comparison with a model.


def test_the_shipped_model_is_small_and_accurate():
    config = load_model_config(TINY)
    params = load_params(TINY, config, "float32")
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) <= 4_000_000
    assert (TINY / "model.safetensors").stat().st_size <= 12_000_000
    assert config.vocab_size == Tokenizer.from_file(str(TINY / "tokenizer.json")).get_vocab_size()

    @jax.jit
    def log_probs(tokens: jax.Array) -> jax.Array:
        batch, length = tokens.shape
        cache = init_cache(config, batch, length, jnp.dtype(jnp.float32))
        count = jnp.full(batch, length, jnp.int32)
        hidden, _, _ = forward(params, config, tokens, count, cache, window=length)
        return jax.nn.log_softmax(unembed(params, hidden), axis=-1)

    rng = Random("held out, tests")
    rows = [write_row(WORLD, rng, 257) for _ in range(32)]
    tokens = jnp.asarray([encode_row(r, IDS)[:-1] for r in rows], jnp.int32)
    predictions = np.asarray(log_probs(tokens))
    result = pd.concat([compare(r, p, IDS) for r, p in zip(rows, predictions, strict=True)])
    assert result["KL"].mean() <= max(0.05, 0.05 * result["true h"].mean())

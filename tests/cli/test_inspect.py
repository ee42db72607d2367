"""Scoring of a given text token by token: values, long texts, and the command line."""

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from entropix_jax.__main__ import main
from entropix_jax.engine import score as scoring
from entropix_jax.engine.score import ScoredToken, score_tokens
from entropix_jax.engine.shapes import PREFILL_WINDOW
from entropix_jax.engine.state import Recording
from entropix_jax.errors import UserError
from entropix_jax.model import cache
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler
from tests.support import reference
from tests.support.commands import Command, refusal, run_command
from tests.support.model_folders import MAX_POSITIONS, poisoned, token_ids, write_model
from tests.support.runs import Spec, calibrated, run_specs
from tests.support.samplers import LITERAL
from tests.support.terminals import ESCAPE, Screen

pytestmark = pytest.mark.usefixtures("own_environment")
QUADRANTS = load_sampler(LITERAL)


def text_of(number: int, seed: int = 0) -> list[int]:
    """Returns a text of random tokens after the begin token."""
    ids = np.random.default_rng(seed).integers(0, 300, number - 1)
    return [token_ids()["<|begin_of_text|>"], *ids.tolist()]


def scored(
    model: LanguageModel, tokens: list[int], sampler: Sampler, **options: Any
) -> Iterator[ScoredToken]:
    return score_tokens(model, tokens, calibrated(model, sampler), **options)


def test_scored_metrics_equal_float64(model: LanguageModel) -> None:
    """Compares every metric of every token with one float64 pass over the whole text."""
    tokens = text_of(90)
    logits, attention = reference.forward(model.params, model.config, np.array(tokens))
    found = list(scored(model, tokens, QUADRANTS))
    assert [token.position for token in found] == list(range(1, 90))
    entropies: list[float] = []
    for token in found:
        before = token.position - 1
        log_probs = reference.log_softmax(logits[before])
        probs = np.exp(log_probs)
        entropies.append(reference.entropy_bits(probs))
        expected = attention[before].metrics(np.ones(model.config.num_layers)) | {
            "entropy": entropies[-1],
            "varentropy": reference.varentropy_bits(probs),
            "logprob": log_probs[tokens[token.position]],
            "sequence_varentropy": np.var(entropies),
        }
        for name, value in expected.items():
            assert getattr(token, name) == pytest.approx(value, rel=1e-4, abs=1e-4), name
        assert token.token_id == tokens[token.position]
        assert token.context == token.position
    text = model.tokenizer.stream(after=tokens[:1]).run(tokens[1:])
    assert "".join(token.text for token in found) == text


def test_scores_equal_the_records_of_a_run(model: LanguageModel) -> None:
    """Regimes are equal, too, with the same bounds as in the run."""
    sampler = load_sampler("temperature")
    (row,) = run_specs(model, [Spec(text_of(9), "0", 60)], sampler, ignore_eos=True).run()
    tokens = [*row.request.prompt, *(token.token_id for token in row.tokens)]
    found = {token.position: token for token in scored(model, tokens, sampler)}
    assert len({token.regime for token in row.tokens}) > 1
    for token in row.tokens:
        same = found[token.position]
        assert (same.regime, same.text) == (token.regime, token.text)
        assert same.logprob == pytest.approx(token.logprob, abs=1e-4)
        assert same.entropy == pytest.approx(token.entropy, abs=1e-4)
        assert same.agreement == pytest.approx(token.agreement, abs=1e-4)


@pytest.mark.parametrize(("length", "context"), [(2, 40), (40, 40), (41, 40), (100, 40), (97, 7)])
def test_a_long_text_is_scored_in_segments(model: LanguageModel, length: int, context: int) -> None:
    """Each token is scored once, after at least half the context, and equals a separate text."""
    tokens = text_of(length)
    found = list(scored(model, tokens, QUADRANTS, context=context))
    assert [token.position for token in found] == list(range(1, length))
    for token in found:
        assert token.context < context
        assert token.context >= min(token.position, context - context // 2)
    for token in found[:: max(len(found) // 6, 1)]:
        alone = tokens[token.position - token.context : token.position + 1]
        again = list(scored(model, alone, QUADRANTS))[-1]
        assert token.entropy == pytest.approx(again.entropy, abs=1e-4)
        assert token.logprob == pytest.approx(again.logprob, abs=1e-4)
        assert token.attn_entropy == pytest.approx(again.attn_entropy, abs=1e-4)


def test_scores_ignore_chunk_sizes(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [token.entropy for token in scored(model, text_of(100), QUADRANTS)]
    sizes = Mock(return_value=16)
    monkeypatch.setattr(scoring, "chunk_size", sizes)
    found = [token.entropy for token in scored(model, text_of(100), QUADRANTS)]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    sizes.assert_called()


def test_memory_does_not_grow_with_the_text(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cache is larger than the smallest one for the context."""
    made = Mock(wraps=cache.init_cache)
    monkeypatch.setattr(scoring, "init_cache", made)
    list(scored(model, text_of(700), QUADRANTS, context=64))
    capacities = [call.args[2] for call in made.call_args_list]
    assert len(capacities) > 10
    assert max(capacities) == PREFILL_WINDOW


def test_recorded_tops_and_layers(model: LanguageModel) -> None:
    recording = Recording(top=3, layers=True)
    for token in scored(model, text_of(12), QUADRANTS, recording=recording):
        assert token.top is not None
        probs = [p for *_, p in token.top]
        assert probs == sorted(probs, reverse=True)
        for token_id, text, p in token.top:
            assert text == model.tokenizer.decode_within([token_id])
            if token_id == token.token_id:
                assert math.log(p) == pytest.approx(token.logprob, abs=1e-4)
        assert token.layers is not None
        layers = np.array(token.layers)
        assert layers.shape == (model.config.num_layers, model.config.num_heads)
        assert layers.mean() == pytest.approx(token.attn_entropy, abs=1e-5)


def test_errors_of_texts(model: LanguageModel, tmp_path: Path) -> None:
    for length, options, message in (
        (1, {}, "too short"),
        (5, {"context": MAX_POSITIONS + 1}, f"at most {MAX_POSITIONS}, not 121"),
        (5, {"recording": Recording(top=10**6)}, "likely tokens must be at most"),
    ):
        with pytest.raises(UserError, match=message):
            list(scored(model, text_of(length), QUADRANTS, **options))
    tokens = text_of(20)
    bad = load(str(write_model(tmp_path / "bad", poisoned(tokens[12]))))
    told = f"NaN or infinite logits at position {tokens.index(tokens[12]) + 1}"
    with pytest.raises(UserError, match=told):
        list(scored(bad, tokens, QUADRANTS))
    # The weights of a padding token do not count.
    padded = load(str(write_model(tmp_path / "padding", poisoned(0))))
    tokens = [token for token in tokens if token != 0]
    assert len(list(scored(padded, tokens, QUADRANTS))) == len(tokens) - 1


# The command line


@pytest.fixture
def command(folder: str) -> Command:
    return partial(run_command, "inspect", "--model", folder)


TEXT = "Once upon a time Anna lived in Paris."


def test_table_and_json(command: Command, model: LanguageModel) -> None:
    head, *lines = command("--text", TEXT).out.splitlines()
    assert head.split()[:3] == ["position", "regime", "logprob"]
    assert lines[-1].endswith("'.'")
    result = command("--text", TEXT, "--format", "json", "--top", 2, "--layers")
    assert result.status == 0
    header, *tokens, footer = map(json.loads, result.out.splitlines())
    ids = model.tokenizer.encode(TEXT, add_bos=True)
    assert header["type"] == "header"
    assert header["seed"] is None
    assert header["prompt_tokens"] == ids[:1]
    assert [token["token_id"] for token in tokens] == ids[1:]
    assert [int(line.split()[0]) for line in lines] == list(range(1, len(ids)))
    assert result.err.splitlines()[-1].startswith(f"{len(lines)} tokens | ")
    assert all(token["type"] == "token" and len(token["top"]) == 2 for token in tokens)
    assert "".join(token["text"] for token in tokens) == TEXT
    assert footer["tokens"] == len(ids) - 1 == sum(footer["regimes"].values())
    nats = [token["logprob"] for token in tokens]
    assert footer["bits_per_token"] == pytest.approx(-np.mean(nats) / math.log(2))
    assert footer["entropy"] == pytest.approx(np.mean([token["entropy"] for token in tokens]))


def test_text_format(command: Command, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--text", TEXT, "--format", "text")
    assert command(*arguments).out == TEXT + "\n"
    screen = Screen(monkeypatch)
    assert main(["inspect", *arguments, "--model", folder]) == 0
    coloured = screen.read()
    assert ESCAPE.search(coloured)
    assert "reading the text, 0.0 s" in coloured
    assert TEXT in ESCAPE.sub("", coloured)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "give the text with --text or --text-file"),
        (("--text", "a", "--text-file", "b"), "only one of them"),
        (("a",), "unexpected argument 'a': give a text as --text TEXT"),
        (("--text", ""), "the text is empty"),
        (("--text", "ab", "--context", -1), "--context must be at least 0"),
        (("--text", "ab", "--top", 3), "need --format json"),
    ],
)
def test_errors_of_inspect(command: Command, arguments: tuple[object, ...], complaint: str) -> None:
    assert complaint in refusal(command(*arguments))

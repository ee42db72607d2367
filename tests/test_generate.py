"""Generation as a Python user calls it: rows, budgets, ends, and that pacing changes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entropix_jax import decode
from entropix_jax import generation as module
from entropix_jax.config import GenerationConfig
from entropix_jax.decode import Recording
from entropix_jax.errors import UserError
from entropix_jax.generation import Generation, encode_prompt, generate
from entropix_jax.loading import LanguageModel, load
from entropix_jax.results import Request, Row
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import CALIBRATION_FILE
from tests.folders import MAX_POSITIONS, poisoned, token_ids, write_model

TOKENS = 40  # of most runs: more than a chunk of steps

pytestmark = pytest.mark.filterwarnings("ignore:.*never calibrated")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load(str(write_model(tmp_path_factory.mktemp("model"))))


def ids(number: int, first: int = 60) -> list[int]:
    """A prompt of single bytes."""
    return [token_ids()["<|begin_of_text|>"], *range(first, first + number - 1)]


def requests(prompts: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[Request]:
    return [Request(prompt, str(i), tokens) for i, prompt in enumerate(prompts)]


def run(model: LanguageModel, wanted: Sequence[Request], **options: Any) -> list[Row]:
    return Generation(model, wanted, **{"ignore_eos": True, **options}).run()


def tokens_of(row: Row) -> list[int]:
    return [token.token_id for token in row.tokens]


def same(one: Row, other: Row) -> bool:
    """The same row, wherever in its batch it was, floats to the last bit."""
    one_tokens, other_tokens = ([replace(t, row=0) for t in row.tokens] for row in (one, other))
    return (one_tokens, one.text, one.finish_reason) == (
        other_tokens,
        other.text,
        other.finish_reason,
    )


def nearly(one: Row, other: Row) -> bool:
    """The same row but for rounding: a batch of another size may add in another order."""
    for a, b in zip(one.tokens, other.tokens, strict=True):
        for name in ("position", "token_id", "text", "regime", "action", "forwards"):
            if getattr(a, name) != getattr(b, name):
                return False
        if abs(a.entropy - b.entropy) > 1e-3 or abs(a.logprob - b.logprob) > 1e-3:
            return False
    return (one.text, one.finish_reason) == (other.text, other.finish_reason)


def test_a_row(model: LanguageModel) -> None:
    (row,) = run(model, requests([ids(5)]))
    assert [token.position for token in row.tokens] == list(range(5, 5 + TOKENS))
    assert [token.forwards for token in row.tokens] == list(range(TOKENS))
    assert row.finish_reason == "length"
    assert row.text == "".join(token.text for token in row.tokens)
    assert row.text == model.tokenizer.decode(tokens_of(row), after=ids(5))
    assert len({token.regime for token in row.tokens}) > 1
    counts = row.to_json()
    assert counts["tokens"] == TOKENS == sum(counts["regimes"].values())
    assert sum(counts["actions"].values()) == TOKENS
    assert counts["forwards"] == TOKENS - 1


def test_pacing_changes_nothing(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(model, requests([ids(5), ids(9, 70), ids(3)]))
    stop = whole[1].text[20:25]

    def results() -> list[Row]:
        return run(model, requests([ids(5), ids(9, 70), ids(3)]), stop=[stop])

    expected = results()
    assert [row.finish_reason for row in expected] == ["length", "stop", "length"]
    for steps in (1, 3, module.MAX_STEPS):

        def pace(self: Generation, waited: float, steps: int = steps) -> None:
            self._steps = steps

        monkeypatch.setattr(Generation, "_pace", pace)
        assert all(map(same, results(), expected)), steps


def test_the_host_looks_after_one_step_and_then_less_often(model: LanguageModel) -> None:
    generation = Generation(model, requests([ids(5)]))
    assert generation._steps == 1
    for _ in range(9):
        generation._pace(0.0)
    assert generation._steps == module.MAX_STEPS
    generation._pace(0.07)
    assert generation._steps == module.MAX_STEPS
    for _ in range(9):
        generation._pace(1.0)
    assert generation._steps == 1


def test_samples_are_the_rows_alone(model: LanguageModel) -> None:
    rows = run(model, requests([ids(20)] * 3))
    assert len({row.text for row in rows}) == 3
    for index, row in enumerate(rows):
        (alone,) = run(model, [Request(ids(20), str(index), TOKENS)])
        assert nearly(row, alone), index


def test_ragged_rows_are_the_rows_alone(model: LanguageModel) -> None:
    prompts = [ids(1), ids(40), ids(7, 80)]
    budgets = [TOKENS, 3, 21]
    wanted = [Request(p, str(i), b) for i, (p, b) in enumerate(zip(prompts, budgets, strict=True))]
    rows = run(model, wanted)
    assert [len(row.tokens) for row in rows] == budgets
    for request, row in zip(wanted, rows, strict=True):
        assert nearly(row, *run(model, [request])), request.row_id


def test_a_prefill_in_chunks_is_one_prefill(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = run(model, requests([ids(90)], 8))
    monkeypatch.setattr(Generation, "_prefill_size", lambda self, length, batch: 16)
    (chunked,) = run(model, requests([ids(90)], 8))
    assert nearly(whole, chunked)


def test_a_shared_prompt_is_run_once(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []
    prefill = decode.prefill

    def counted(params: Any, state: Any, tokens: Any, *rest: Any, **options: Any) -> Any:
        batches.append(tokens.shape[0])
        return prefill(params, state, tokens, *rest, **options)

    monkeypatch.setattr(module, "prefill", counted)
    shared = run(model, [Request(ids(20), str(i), 4 + i) for i in range(3)])
    assert batches == [1]
    assert [len(row.tokens) for row in shared] == [4, 5, 6], "each row has its own budget"
    # With another prompt in the third row nothing is shared.
    separate = run(
        model, [*(Request(ids(20), str(i), 4 + i) for i in range(2)), *requests([ids(3)])]
    )
    assert batches == [1, 3]
    assert all(map(nearly, shared[:2], separate[:2]))


def test_the_seed_and_the_row_id_make_the_draws(model: LanguageModel) -> None:
    def texts(seed: int, row_id: str) -> str:
        (row,) = run(model, [Request(ids(20), row_id, TOKENS)], seed=seed)
        return row.text

    assert texts(0, "0") == texts(0, "0")
    assert len({texts(0, "0"), texts(1, "0"), texts(-1, "0"), texts(10**30, "0")}) == 4
    assert texts(0, "0") != texts(0, "1")


def test_a_row_ends_at_the_last_position(model: LanguageModel) -> None:
    prompt = ids(MAX_POSITIONS - 5)
    (row,) = run(model, requests([prompt], 50))
    assert [token.position for token in row.tokens] == list(range(MAX_POSITIONS - 5, MAX_POSITIONS))
    assert row.finish_reason == "context"
    (row,) = run(model, requests([prompt], 5))
    assert row.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "tokens", "message"),
    [
        ([], 5, "the prompt is empty"),
        ([65] * MAX_POSITIONS, 5, f"has {MAX_POSITIONS} tokens, the model {MAX_POSITIONS}"),
        ([65], 0, "max_new_tokens must be at least 1, not 0"),
        ([65], -3, "max_new_tokens must be at least 1, not -3"),
    ],
)
def test_requests_that_cannot_be_met(
    model: LanguageModel, prompt: list[int], tokens: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Generation(model, [Request(prompt, "0", tokens)])


def test_samplers_and_recordings_that_do_not_fit(model: LanguageModel) -> None:
    wanted = requests([ids(5)])
    last = model.config.vocab_size - 1
    for ban, fits in ((last, True), (last + 1, False)):
        sampler = load_sampler("greedy").with_values({"draw.bans": [ban]})
        if fits:
            Generation(model, wanted, sampler)
        else:
            with pytest.raises(UserError, match=f"draw.bans holds {ban}, which is no token"):
                Generation(model, wanted, sampler)
    with pytest.raises(UserError, match=f"the {last + 2} likeliest tokens are asked for"):
        Generation(model, wanted, recording=Recording(top=last + 2))


def test_end_tokens(model: LanguageModel) -> None:
    (whole,) = run(model, requests([ids(5)]))
    end = tokens_of(whole)[12]
    at = tokens_of(whole).index(end)
    turn_end = token_ids()["<|eot_id|>"]
    ending = replace(model, generation=GenerationConfig(eos_ids=(turn_end, end)))

    (row,) = run(ending, requests([ids(5)]), ignore_eos=False)
    assert tokens_of(row) == tokens_of(whole)[: at + 1]
    assert row.finish_reason == "eos"
    (row,) = run(ending, requests([ids(5)]), ignore_eos=True)
    assert same(row, whole)
    # At the last token of the budget, the end token is the reason.
    (row,) = run(ending, requests([ids(5)], at + 1), ignore_eos=False)
    assert row.finish_reason == "eos"


def test_the_end_of_a_turn_ends_a_chat(model: LanguageModel) -> None:
    base = replace(model, generation=GenerationConfig(eos_ids=(7,)))
    turn_end = token_ids()["<|eot_id|>"]
    for turn in (True, False):
        generation = Generation(base, requests([ids(5)]), turn_end=turn)
        assert (turn_end in generation._eos_ids.tolist()) == turn
        assert 7 in generation._eos_ids.tolist()
    crowded = replace(model, generation=GenerationConfig(eos_ids=tuple(range(9))))
    with pytest.raises(UserError, match="names 9 end tokens, at most 8"):
        Generation(crowded, requests([ids(5)]))


def test_stop_strings(model: LanguageModel) -> None:
    (whole,) = run(model, requests([ids(5)]))
    texts = [token.text for token in whole.tokens]
    # Over three tokens, and from the middle of one to the middle of another.
    first = next(
        i
        for i in range(5, TOKENS - 3)
        if all(len(t) > 1 for t in texts[i : i + 3])
        and whole.text.index(texts[i][1:] + texts[i + 1]) >= len("".join(texts[:i]))
    )
    stop = texts[first][1:] + texts[first + 1] + texts[first + 2][:1]
    generation = Generation(model, requests([ids(5)]), stop=["never", stop], ignore_eos=True)
    shown = ""
    for event in generation:
        shown += "".join(piece.text for piece in event.pieces)
        assert whole.text.startswith(shown)
    (row,) = generation.rows
    assert row.finish_reason == "stop"
    assert row.text == shown == whole.text[: whole.text.index(stop)]
    assert tokens_of(row) == tokens_of(whole)[: first + 3], (
        "the token that completes it is the last"
    )
    joined = "".join(token.text for token in row.tokens)
    assert joined.startswith(row.text + stop)


def test_a_row_that_met_its_stop_string_costs_nothing_more(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(model, requests([ids(5), ids(9, 70), ids(3)]))
    finishes = []
    step = decode.decode

    def watched(params: Any, sampler: Any, eos: Any, state: Any, *rest: Any, **options: Any) -> Any:
        finishes.append(state.finish.tolist())
        return step(params, sampler, eos, state, *rest, **options)

    monkeypatch.setattr(module, "decode", watched)
    monkeypatch.setattr(Generation, "_pace", lambda self, waited: None)
    run(model, requests([ids(5), ids(9, 70), ids(3)]), stop=[whole[1].text[2:5]])
    assert finishes[0] == [decode.RUNNING] * 3
    assert finishes[-1] == [decode.RUNNING, decode.FINISHED_STOP, decode.RUNNING]


def test_text_that_was_held_back_comes_at_the_end(model: LanguageModel) -> None:
    (whole,) = run(model, requests([ids(5)]))
    stop = whole.text[-3:] + "and never this"
    generation = Generation(model, requests([ids(5)]), stop=[stop], ignore_eos=True)
    *_, last = generation
    assert "".join(piece.text for piece in last.pieces).endswith(whole.text[-3:])
    assert generation.rows[0].text == whole.text


def test_an_unfinished_character_belongs_to_the_last_token(model: LanguageModel) -> None:
    """A budget that ends in the middle of a character: U+FFFD, in the trace as in the text."""
    leads = range(0xC2, 0xF5)  # the first bytes of longer characters; a byte is its own id
    seed, at = next(
        (seed, at)
        for seed in range(50)
        for at, token in enumerate(run(model, requests([ids(5)]), seed=seed)[0].tokens)
        if token.token_id in leads and token.text == ""
    )
    (row,) = run(model, requests([ids(5)], at + 1), seed=seed)
    assert row.tokens[-1].token_id in leads
    assert row.tokens[-1].text == "\ufffd"
    assert row.text == "".join(token.text for token in row.tokens)


def test_logits_that_are_not_numbers_end_their_row_alone(
    model: LanguageModel, tmp_path: Path
) -> None:
    rows = run(model, requests([ids(20)] * 3))
    seen = [tokens_of(row) for row in rows]
    at, token = next(
        (i, t)
        for i, t in enumerate(seen[1])
        if i > 3 and t not in seen[0] + seen[2] + seen[1][:i] + ids(20)
    )
    broken = load(str(write_model(tmp_path, poisoned(token))))
    generation = Generation(broken, requests([ids(20)] * 3), ignore_eos=True, stop=[rows[1].text])
    pieces = ["", "", ""]
    for event in generation:
        pieces[event.row] += "".join(piece.text for piece in event.pieces)
    first, second, third = generation.rows
    assert second.finish_reason == "error"
    assert second.error == f"row 1: NaN or infinite logits at position {20 + at + 1}"
    assert tokens_of(second) == seen[1][: at + 1]
    assert second.to_json()["error"] == second.error
    assert nearly(first, rows[0])
    assert nearly(third, rows[2])
    assert pieces == [row.text for row in generation.rows], "held text is given on an error too"


def test_an_interrupt_gives_the_text_so_far(model: LanguageModel) -> None:
    (whole,) = run(model, requests([ids(5)]))
    stop = whole.text[:-1] + "never"  # holds all text back
    generation = Generation(model, requests([ids(5)] * 3), stop=[stop], ignore_eos=True)
    for event in generation:
        if event.token is not None and event.token.position == 15:
            break
    first, *_ = generation.interrupt()
    row = generation.rows[0]
    assert row.finish_reason == "interrupt"
    assert row.text == "".join(token.text for token in row.tokens) == whole.text[: len(row.text)]
    assert first.token is None
    assert "".join(piece.text for piece in first.pieces) == row.text
    assert generation.interrupt() == []
    assert set(generation.timings) == {"first_token", "total"}


def test_a_run_that_is_asked_to_stop(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = Generation(model, requests([ids(5)] * 3), ignore_eos=True)
    events = 0
    for event in generation:
        events += 1
        if event.token is not None and event.token.position == 15 and event.row == 1:
            generation.stop()
    assert events == 3 * 10 + 2, "the event that asks is the last"
    assert [row.finish_reason for row in generation.rows] == [None] * 3
    generation.interrupt()
    assert [len(row.tokens) for row in generation.rows] == [11, 11, 10]

    # Asked while the prompt is read, it does not begin to decode.
    generation = Generation(model, requests([ids(5)]), ignore_eos=True)
    prefill = decode.prefill

    def ask(*arguments: Any, **options: Any) -> Any:
        generation.stop()
        return prefill(*arguments, **options)

    monkeypatch.setattr(module, "prefill", ask)
    monkeypatch.setattr(module, "decode", None)
    assert list(generation) == []


def test_an_interrupt_before_the_first_token(model: LanguageModel) -> None:
    generation = Generation(model, requests([ids(5)]))
    assert [event.pieces for event in generation.interrupt()] == [()]
    assert generation.rows[0].to_json()["tokens"] == 0
    assert 0 <= generation.timings["total"] < 60


def test_what_is_recorded_on_request(model: LanguageModel) -> None:
    (row,) = run(
        model, requests([ids(5)], 4), recording=Recording(top=3, layers=True), sampler="greedy"
    )
    for token in row.tokens:
        assert token.top is not None
        assert token.layers is not None
        likeliest, text, probability = token.top[0]
        assert likeliest == token.token_id, "greedy takes the first"
        assert text == model.tokenizer.decode([likeliest])
        probabilities = [p for _, _, p in token.top]
        assert sorted(probabilities, reverse=True) == probabilities
        assert probability == pytest.approx(2.718281828**token.logprob, rel=1e-4)
        assert len(token.layers) == model.config.num_layers
        assert {len(heads) for heads in token.layers} == {model.config.num_heads}
        mean = sum(map(sum, token.layers)) / sum(map(len, token.layers))
        assert token.attn_entropy == pytest.approx(mean, rel=1e-4)
    json.dumps([token.to_json() for token in row.tokens])


def test_prompts(model: LanguageModel) -> None:
    special = token_ids()
    begin = special["<|begin_of_text|>"]
    plain = encode_prompt(model, "Once", chat=False)
    assert plain[0] == begin
    assert begin not in plain[1:]
    assert encode_prompt(model, "<|begin_of_text|>Once", chat=False) == plain

    chat = encode_prompt(model, "Once", chat=True)
    assert chat.count(begin) == 1
    assert chat.count(special["<|eot_id|>"]) == 1
    assert model.tokenizer.decode(chat, skip_special=False).endswith(
        "assistant<|end_header_id|>\n\n"
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Once"}]
    assert encode_prompt(model, messages, chat=True) == encode_prompt(
        model, "Once", chat=True, system="Be brief."
    )
    for prompt, system, message in (
        ("", None, "the prompt is empty"),
        ("Once", "Be brief.", r"a system message needs a chat"),
        (messages, None, r"a conversation needs a chat"),
    ):
        with pytest.raises(UserError, match=message):
            encode_prompt(model, prompt, chat=False, system=system)


def test_generate(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    turn_end = token_ids()["<|eot_id|>"]
    base = replace(model, generation=GenerationConfig(eos_ids=(token_ids()["<|end_of_text|>"],)))
    options: dict[str, Any] = {"max_new_tokens": 8, "seed": 3, "ignore_eos": True}
    rows = generate(model, "Once", samples=3, **options)
    prompt = encode_prompt(model, "Once", chat=True)
    assert [tuple(row.request.prompt) for row in rows] == [tuple(prompt)] * 3
    assert all(
        map(same, rows, Generation(model, requests([prompt] * 3, 8), seed=3, ignore_eos=True).run())
    )
    (row,) = generate(model, "Once", "greedy", chat=False, **options)
    assert list(row.request.prompt) == encode_prompt(model, "Once", chat=False)
    (row,) = generate(model, [{"role": "user", "content": "Once"}], **options)
    assert nearly(row, rows[0])
    for chat in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(Generation, "run", lambda self: self._eos_ids.tolist())
            ends: Any = generate(base, "Once", chat=chat)
        assert (turn_end in ends) == chat
    with pytest.raises(UserError, match="samples must be at least 1, not 0"):
        generate(model, "Once", samples=0)


def test_an_iteration_goes_on_where_it_was_left(model: LanguageModel) -> None:
    wanted = requests([ids(3)], 6)
    left = Generation(model, wanted, ignore_eos=True)
    for event in left:
        if event.token is not None and event.token.forwards == 2:
            break
    (row,) = left.run()
    assert same(row, run(model, wanted)[0])


def test_a_sampler_object_is_calibrated_like_its_name(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    thresholds = {"h1": 0.1, "h2": 0.2, "u1": 0.3, "u2": 0.4}
    calibration = model.folder / CALIBRATION_FILE
    calibration.write_text(json.dumps({"thresholds": thresholds}), encoding="utf-8")
    try:
        for sampler in ("entropix", load_sampler("entropix")):
            used = Generation(model, requests([ids(3)]), sampler).sampler.values
            assert {k: used[f"thresholds.{k}"] for k in thresholds} == thresholds
    finally:
        calibration.unlink()


@pytest.mark.parametrize(
    ("wanted", "options", "words"),
    [
        ([], {}, "no request"),
        ([[1, 10**6]], {}, "holds 1000000, which is no token"),
        ([[-3]], {}, "holds -3, which is no token"),
        ([[1]], {"recording": Recording(top=-1)}, "the -1 likeliest"),
    ],
)
def test_what_cannot_be_run_is_refused_before_it_runs(
    model: LanguageModel, wanted: list[list[int]], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        Generation(model, requests(wanted), **options)


def test_one_stop_string_may_stand_alone(model: LanguageModel) -> None:
    plain = generate(model, "Once", "greedy", max_new_tokens=20, ignore_eos=True)[0].text
    stop = plain[6:9]
    (row,) = generate(model, "Once", "greedy", max_new_tokens=20, ignore_eos=True, stop=stop)
    assert row.text == plain[: plain.index(stop)]


def test_a_long_prompt_is_cut_by_what_its_scores_take(model: LanguageModel) -> None:
    heads = model.config.num_heads
    generation = Generation(model, requests([ids(3)]))
    for length, batch in ((100, 1), (5000, 1), (5000, 5), (100_000, 3)):
        size = generation._prefill_size(length, batch)
        assert size & (size - 1) == 0
        assert 16 <= size <= 512
        window = 1 << (length - 1).bit_length()
        assert size == 16 or size * window * batch * heads * 4 <= 1 << 28


def test_a_note_of_the_sampler_is_a_warning(model: LanguageModel) -> None:
    with pytest.warns(UserWarning, match="never calibrated"):
        generate(model, "Once", max_new_tokens=1)

"""Generation through the Python API: rows, budgets, ends, recording, hooks and pacing."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entropix_jax.engine import api as runs
from entropix_jax.engine import decode
from entropix_jax.engine import programs as module
from entropix_jax.engine import row as row_module
from entropix_jax.engine.api import generate, stream
from entropix_jax.engine.hooks import result_tokens
from entropix_jax.engine.records import MAX_TOP
from entropix_jax.engine.results import Row
from entropix_jax.engine.shapes import MAX_STEPS
from entropix_jax.engine.state import Recording
from entropix_jax.engine.tokens import encode_prompt
from entropix_jax.errors import Note, UserError
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.names import BOXES
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.text.tokenizer import load_tokenizer
from tests.support.model_folders import MAX_POSITIONS, poisoned, token_ids, write_model
from tests.support.runs import Spec, ids_of, is_same, run_specs, set_pace
from tests.support.samplers import LITERAL
from tests.support.tokenizers import byte_fallback, save

TOKENS = 40  # of most runs: more than a chunk of steps
RECORDING = Recording(top=MAX_TOP, layers=True)


def ids(number: int, first: int = 60) -> list[int]:
    """Returns a prompt of single-byte tokens."""
    return [token_ids()["<|begin_of_text|>"], *range(first, first + number - 1)]


def requests(prompts: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[Spec]:
    return [Spec(prompt, str(i), tokens) for i, prompt in enumerate(prompts)]


def run(model: LanguageModel, wanted: Sequence[Spec], **options: Any) -> list[Row]:
    return run_specs(model, wanted, **{"ignore_eos": True, **options}).run()


def same(one: Row, other: Row) -> bool:
    """Compares two rows bit for bit, except for their index in the batch."""
    one_tokens, other_tokens = ([replace(t, row=0) for t in row.tokens] for row in (one, other))
    ends = [(row.text, row.finish_reason) for row in (one, other)]
    return one_tokens == other_tokens and ends[0] == ends[1]


@pytest.fixture(scope="module")
def whole(model: LanguageModel) -> Row:
    """A row of the default sampler after a prompt of five tokens."""
    return run(model, requests([ids(5)]))[0]


def test_results_ignore_the_pace(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = requests([ids(5), ids(9, 70), ids(3)])
    stop = run(model, wanted)[1].text[20:25]
    expected = run(model, wanted, stop=[stop])
    assert [row.finish_reason for row in expected] == ["length", "stop", "length"]
    for steps in (1, 3, MAX_STEPS):
        set_pace(monkeypatch, steps)
        assert all(map(same, run(model, wanted, stop=[stop]), expected)), steps


def test_draws_depend_on_seed_and_row_id(model: LanguageModel) -> None:
    def texts(seed: int, row_id: str) -> str:
        (row,) = run(model, [Spec(ids(20), row_id, TOKENS)], seed=seed)
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


def test_the_turn_end_token_ends_chat_rows(model: LanguageModel) -> None:
    base = replace(model, eos_ids=(7,))
    turn_end = token_ids()["<|eot_id|>"]
    for chat in (True, False):
        (row,) = stream(base, "Once", chat=chat).rows
        assert (turn_end in row.request.eos_ids) == chat
        assert 7 in row.request.eos_ids
    (row,) = stream(base, "Once", ignore_eos=True).rows
    assert row.request.eos_ids == ()


def test_stop_strings(model: LanguageModel, whole: Row) -> None:
    texts = [token.text for token in whole.tokens]
    # It spans three tokens, from the middle of the first to the middle of the last.
    first = next(
        i
        for i in range(5, TOKENS - 3)
        if all(len(t) > 1 for t in texts[i : i + 3])
        and whole.text.index(texts[i][1:] + texts[i + 1]) >= len("".join(texts[:i]))
    )
    stop = texts[first][1:] + texts[first + 1] + texts[first + 2][:1]
    generation = run_specs(model, requests([ids(5)]), stop=["never", stop], ignore_eos=True)
    shown = ""
    for event in generation:
        shown += "".join(piece.text for piece in event.pieces)
        assert whole.text.startswith(shown)
    (row,) = generation.rows
    assert row.finish_reason == "stop"
    assert row.text == shown == whole.text[: whole.text.index(stop)]
    assert ids_of(row) == ids_of(whole)[: first + 3]  # the token that completes it
    # Held-back text is emitted at the end.
    stop = whole.text[-3:] + "and never this"
    generation = run_specs(model, requests([ids(5)]), stop=[stop], ignore_eos=True)
    *_, last = generation
    assert "".join(piece.text for piece in last.pieces).endswith(whole.text[-3:])
    assert generation.rows[0].text == whole.text


def test_a_stop_string_may_be_a_control_token(model: LanguageModel, whole: Row) -> None:
    """A control token has no text, so its id ends the row, even with `ignore_eos`."""
    name = "<|start_header_id|>"
    forced = load_sampler("greedy").with_values({"draw.bias": [[token_ids()[name], 100.0]]})
    options: Any = {"max_new_tokens": 6, "ignore_eos": True}
    (row,) = generate(model, "Once", forced, **options)
    assert row.finish_reason == "length"
    for stop in (name, ["never", name]):
        (row,) = generate(model, "Once", forced, stop=stop, **options)
        assert (row.finish_reason, ids_of(row), row.text) == ("stop", [token_ids()[name]], "")
    # Ordinary text still works as a stop string.
    assert generate(model, "Once", "greedy", stop=" ", **options)[0].finish_reason == "stop"


def test_a_list_of_prompts_is_a_batch(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_MAX_SLOTS", 2)
    chat = [{"role": "user", "content": "Hi"}]
    prompts: list[Any] = ["Once upon", chat, "Once upon", "12 + 7 ="]
    options: Any = {"max_new_tokens": 12, "seed": 3}
    rows = generate(model, prompts, "min-p", **options)
    assert [row.number for row in rows] == [0, 1, 2, 3]
    twice = generate(model, "Once upon", "min-p", samples=2, **options)
    assert twice[0].text != twice[1].text
    alone = [twice[0], *generate(model, chat, "min-p", **options), twice[1]]
    alone += generate(model, "12 + 7 =", "min-p", **options)
    assert all(map(is_same, rows, alone))
    # Rows are ordered by prompt. A run with several prompts has no trace.
    rows = generate(model, prompts[:2], "min-p", samples=2, **options)
    assert [row.request.row_id for row in rows] == ["0", "1", "0", "1"]
    with pytest.raises(UserError, match="a trace needs rows of one run with one prompt"):
        rows.save_trace("never.jsonl")


def test_an_unfinished_character_belongs_to_the_last_token(model: LanguageModel) -> None:
    """A budget that ends within a character gives U+FFFD, in the trace as in the text."""
    leads = range(0xC2, 0xF5)  # the first bytes of longer characters; a byte is its own id
    row = next(
        row
        for seed in range(50)
        for at, token in enumerate(run(model, requests([ids(5)]), seed=seed)[0].tokens)
        if token.token_id in leads and token.text == ""
        for row in run(model, requests([ids(5)], at + 1), seed=seed)
        if row.tokens[-1].token_id in leads  # branches within a smaller budget may be others
    )
    assert row.tokens[-1].text == "\ufffd"
    assert row.text == "".join(token.text for token in row.tokens)


def test_non_finite_logits_end_only_their_row(model: LanguageModel, tmp_path: Path) -> None:
    rows = run(model, requests([ids(20)] * 3))
    seen = [ids_of(row) for row in rows]
    lost = [token.token_id for row in rows for token in row.retracted_tokens]
    for branches in (token.branches or () for row in rows for token in row.tokens):
        lost += [token for branch in branches for token in branch.tokens]
    at, token = next(
        (i, t)
        for i, t in enumerate(seen[1])
        if i > 3 and t not in seen[0] + seen[2] + seen[1][:i] + ids(20) + lost
    )
    broken = load(str(write_model(tmp_path, poisoned(token))))
    generation = run_specs(broken, requests([ids(20)] * 3), ignore_eos=True, stop=[rows[1].text])
    pieces = ["", "", ""]
    for event in generation:
        pieces[event.row.number] += "".join(piece.text for piece in event.pieces)
    first, second, third = generation.rows
    assert second.finish_reason == "error"
    assert second.error == f"NaN or infinite logits at position {20 + at + 1}"
    assert ids_of(second) == seen[1][: at + 1]
    assert all(map(is_same, (first, third), (rows[0], rows[2])))
    assert pieces == [row.text for row in generation.rows], "held text is given on an error too"


def test_stop_and_interrupt(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each step commits one token per row, and nothing is retracted.
    generation = run_specs(model, requests([ids(5)] * 3), "document-001", ignore_eos=True)
    events = 0
    for event in generation:
        events += 1
        if event.token is not None and event.token.position == 15 and event.row.number == 1:
            generation.stop()
    assert events == 3 * 10 + 2, "the event that asks is the last"
    assert [row.finish_reason for row in generation.rows] == [None] * 3
    generation.interrupt()
    assert [len(row.tokens) for row in generation.rows] == [11, 11, 10]


def test_encode_prompt(model: LanguageModel) -> None:
    special = token_ids()
    begin = special["<|begin_of_text|>"]
    plain, chat = (encode_prompt(model, "Once", chat=chat) for chat in (False, True))
    assert plain[0] == begin
    assert plain.count(begin) == chat.count(begin) == chat.count(special["<|eot_id|>"]) == 1
    assert encode_prompt(model, "<|begin_of_text|>Once", chat=False) == plain
    shown = model.tokenizer.decode(chat, skip_special=False)
    assert shown.endswith("assistant<|end_header_id|>\n\n")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Once"}]
    with_system = encode_prompt(model, "Once", chat=True, system="Be brief.")
    assert encode_prompt(model, messages, chat=True) == with_system


# Hooks


# Injects a thought in about every other step.
THINKING = load_sampler(LITERAL).with_values(
    {
        "regimes.helv": ["entropy > 1.5"],
        "arms.lehv": "explore",
        "inject.thought": ["Hm.", "So:"],
        "inject.cooldown": 1,
    }
)
# Looks something up instead.
LOOKING = THINKING.with_values(
    {
        "arms.helv": "lookup",
        "lookup.per_row": 1000,
        "lookup.cooldown": 1,
        "lookup.before": "",
        "lookup.after": "",
    }
)


class Shown:
    """A run of one row, with its text emitted so far."""

    def __init__(self, model: LanguageModel, **options: Any) -> None:
        self.model, self.shown = model, ""
        self.generation = run_specs(model, requests([ids(5)]), ignore_eos=True, **options)

    def run(self) -> Row:
        for event in self.generation:
            self.shown += "".join(piece.text for piece in event.pieces)
        return self.generation.rows[0]


class Library(Shown):
    """A `lookup` hook that cycles through its texts and checks its argument."""

    def __init__(self, model: LanguageModel, texts: Sequence[str | None], **options: Any) -> None:
        super().__init__(model, lookup=self.look_up, **options)
        self.texts = texts
        self.found: list[tuple[int, str | None]] = []  # the number of tokens, and the text returned

    def look_up(self, text: str) -> str | None:
        (row,) = self.generation.rows
        known = [*row.request.prompt, *ids_of(row)]
        plain = self.model.tokenizer.decode(known)
        assert text.replace("\n", "") == plain.replace("\n", "")
        assert self.shown == row.text
        answer = self.texts[len(self.found) % len(self.texts)]
        self.found.append((len(row.tokens), answer))
        return answer


@pytest.mark.parametrize("texts", [["XY", "", " of the", "z" * 60, None], [None], ["a fact"]])
def test_results_of_lookups_are_inserted(
    model: LanguageModel, texts: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result is inserted where the row waits for it, unless the row has it or no space for it."""
    library = Library(model, texts, sampler=LOOKING)
    row = library.run()
    assert len(library.found) > 5
    expected, prompt = 0, [*row.request.prompt]
    for at, text in library.found:
        tokens = model.tokenizer.encode_within((text or "").strip())
        before = [*prompt, *ids_of(row)[:at]]
        has = any(before[i : i + len(tokens)] == tokens for i in range(len(before)))
        wanted = tokens if len(tokens) <= TOKENS - at and not has else []
        written = row.tokens[at : at + len(wanted)]
        assert [token.token_id for token in written] == wanted
        assert {token.action for token in written} <= {"lookup"}
        assert wanted or row.tokens[at].action == "sample"
        expected += len(wanted)
    assert sum(token.action == "lookup" for token in row.tokens) == expected
    assert (len(row.tokens), row.finish_reason) == (TOKENS, "length")
    for steps in (1, 7, MAX_STEPS):
        set_pace(monkeypatch, steps)
        again = Library(model, texts, sampler=LOOKING)
        assert same(again.run(), row)
        assert again.found == library.found


@pytest.mark.parametrize("per_row", [10**6, 3])
@pytest.mark.parametrize("text", ["", "x", "a text that does not fit " * 20])
def test_lookups_of_a_row_are_limited(model: LanguageModel, text: str, per_row: int) -> None:
    """A row that looks something up at every position ends, with any results."""
    asked: list[str] = []

    def look_up(said: str) -> str:
        asked.append(said)
        return text

    always: dict[str, Any] = {f"regimes.{box}": ["entropy < -1"] for box in BOXES}
    always |= {"regimes.helv": ["entropy > -1"], "loop.max_period": 0, "lookup.per_row": per_row}
    sampler = LOOKING.with_values(always)
    (row,) = run(model, requests([ids(3)], 20), sampler=sampler, lookup=look_up)
    assert (len(row.tokens), row.finish_reason) == (20, "length")
    assert min(5, per_row) <= len(asked) <= min(20, per_row)
    assert len({*asked}) == len(asked), "once at a position"


@pytest.mark.parametrize("kind", ["draw.bans", "draw.bias"])
def test_texts_with_banned_tokens_are_not_inserted(model: LanguageModel, kind: str) -> None:
    """A bias of -100 bans, too."""

    def written(*banned: str) -> set[str]:
        tokens = [model.tokenizer.encode_within(text)[-1] for text in banned]
        value: Any = tokens if kind == "draw.bans" else [[token, -100] for token in tokens]
        found = set[str]()
        for sampler, text in ((THINKING, "Hm."), (LOOKING, "XY")):
            changed = sampler.with_values({"inject.thought": "Hm.", kind: value})
            (row,) = run(model, requests([ids(5)]), sampler=changed, lookup=lambda _: "XY")
            assert not {*tokens} & {token.token_id for token in row.tokens}
            forced = [token.text for token in row.tokens if token.action in ("inject", "lookup")]
            found |= {text} if text in "".join(forced) else set()
        return found

    assert written() == {"XY", "Hm."}
    assert written("Hm.") == {"XY"}
    assert written("XY") == {"Hm."}


def test_form_of_a_result(model: LanguageModel) -> None:
    """Control tokens are removed by id. A long result ends with a whole word."""
    tokenizer = model.tokenizer
    values = {"lookup.before": " [", "lookup.after": ["]"], "lookup.most": 8}

    def shown(found: str) -> str:
        tokens = result_tokens(tokenizer, values, found)
        assert not {*tokens} & tokenizer.special_ids
        return tokenizer.decode_within(tokens)

    assert shown("Nora.") == " [Nora.]"
    assert shown("  ") == shown("") == shown("<|eot_id|>") == ""
    assert "Nora" in shown("<|eot_id|>Nora")
    assert shown("a b " * 10**6) == " [a b a b a b a]"
    assert shown("z" * 10**7) == ""
    assert shown("\ud800") == " [?]"


def test_a_lookup_without_a_result_is_reported(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup that fails or is late changes nothing but the count of lookups."""
    wanted, sampler = requests([ids(5)]), LOOKING.with_values({"lookup.per_row": 2})
    (whole,) = run(model, wanted, sampler=sampler, lookup=lambda _: None)
    failed: Future[str] = Future()
    failed.set_exception(OSError("gone\nfor good"))
    monkeypatch.setattr(row_module, "LOOKUP_SECONDS", 0.1)
    for look_up, why in (
        (lambda _: failed, "gone"),
        (lambda _: 1 / 0, "division by zero"),
        (lambda _: Future(), r"no result within 15 s"),
    ):
        with pytest.warns(Note, match=rf"^a lookup failed: {why}: the row continues without it$"):
            (row,) = run(model, wanted, sampler=sampler, lookup=look_up)
        assert same(row, whole)
    with pytest.raises(UserError, match=r"^lookup returned 5: it must return a text, None or a F"):
        run(model, wanted, sampler=sampler, lookup=lambda _: 5)


def test_other_rows_run_while_one_waits(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result arrives after all other rows have ended, those that waited for a slot included."""
    monkeypatch.setattr(runs, "_MAX_SLOTS", 2)
    wanted, sampler = (
        requests([ids(5), ids(9, 70), ids(3)]),
        LOOKING.with_values({"lookup.per_row": 1}),
    )
    expected = run(model, wanted, sampler=sampler, lookup=lambda text: f"{len(text)}!")
    start, late = model.tokenizer.decode(ids(5)), dict[str, Future[str]]()

    def look_up(text: str) -> str | Future[str]:
        if not text.startswith(start):
            return f"{len(text)}!"
        return late.setdefault(text, Future())

    generation = run_specs(model, wanted, sampler, ignore_eos=True, lookup=look_up)
    ended = 0
    for event in generation:
        ended += event.row.number > 0 and event.row.finish_reason is not None
        ((text, future),) = late.items() if late else [("", None)]
        if ended == 2 and future is not None and not future.done():
            future.set_result(f"{len(text)}!")
    assert len(late) == 1
    assert all(map(is_same, generation.rows, expected))


def test_a_run_stops_while_all_rows_wait(model: LanguageModel) -> None:
    never: Future[str] = Future()
    generation = run_specs(model, requests([ids(5)]), LOOKING, lookup=lambda _: never)
    timer = threading.Timer(0.5, generation.stop)
    timer.start()
    (row,) = generation.run()
    assert row.finish_reason is None
    generation.interrupt()
    assert row.finish_reason == "interrupt"


def test_inserted_texts_keep_their_spaces(model: LanguageModel, tmp_path: Path) -> None:
    """Thoughts, passages, branches and likely tokens keep them with a tokenizer that adds a space
    before a text, and drops it again."""
    spaced = replace(model, tokenizer=load_tokenizer(save(tmp_path, byte_fallback())))
    prompt = spaced.tokenizer.encode("a cat", add_bos=True)
    wanted = [Spec(prompt, "0", TOKENS)]
    for text in (" a cat", "a cat"):
        for sampler, options in (
            (THINKING.with_values({"inject.thought": text}), {}),
            (LOOKING.with_values({"lookup.before": text}), {"lookup": lambda _: "s"}),
        ):
            (row,) = run(spaced, wanted, sampler=sampler, **options)
            written = [t.text for t in row.tokens if t.action in ("inject", "lookup")]
            assert "".join(written).startswith(text + ("s" if options else text))
    (row,) = run(spaced, wanted, sampler=FORKING, recording=RECORDING)
    own = spaced.tokenizer.token_id("▁a")
    likely = [(i, text) for token in row.tokens for i, text, _ in token.top or ()]
    assert {text for i, text in likely if i == own} == {" a"}
    branches = [branch for token in row.tokens for branch in token.branches or ()]
    known = [branch for branch in branches if branch.tokens[0] == own]
    assert all(branch.text.startswith(" a") for branch in known)


def test_invalid_answers_are_reported(model: LanguageModel) -> None:
    for answer in (2, -1, "first"):
        options: dict[str, Any] = {"ask": lambda row, texts, answer=answer: answer}
        with pytest.raises(UserError, match=rf"^ask returned {answer!r}: it must return 0, 1"):
            run(model, requests([ids(5)]), sampler=FORKING, **options)


def test_a_row_that_ends_while_it_waits_does_not_block_others(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host finds the stop string when the device has already reached the next lookup. The row
    gets no result, and must not block the others, of which each gets its own result."""
    wanted = requests([ids(5), ids(9, 70), ids(3)])
    asked: list[str] = []

    def look_up(text: str) -> str:
        asked.append(text)
        return f"{len(text)}!"

    set_pace(monkeypatch, 4)
    whole = run(model, wanted, sampler=LOOKING, lookup=look_up)
    for request, row in zip(wanted, whole, strict=True):
        assert is_same(row, *run(model, [request], sampler=LOOKING, lookup=look_up))
    calls, step = itertools.count(), decode.decode

    def counted(*arguments: Any, **options: Any) -> Any:
        assert next(calls) < 4 * TOKENS, "nothing goes on any more"
        return step(*arguments, **options)

    monkeypatch.setattr(module, "decode_for_backend", lambda: counted)
    for number in (4, 8, 13):
        stop = "".join(token.text for token in whole[0].tokens[:number])[-3:]
        asked.clear()
        generation = run_specs(model, wanted, LOOKING, ignore_eos=True, lookup=look_up, stop=stop)
        calls = itertools.count()
        generation.run()
        assert next(calls) > 4
        first, second, _ = generation.rows
        for row, full in ((first, whole[0].text), (second, whole[1].text)):
            assert row.finish_reason == ("stop" if stop in full else "length")
            assert row.text == full.partition(stop)[0]
        # `lookup` is not called for a row whose text has ended.
        prompt = model.tokenizer.decode(ids(5))
        assert not any(text.startswith(prompt) and stop in text for text in asked)


# Branches in nearly every step, with scores that are always ambiguous.
FORKING = load_sampler(LITERAL).with_values(
    {
        "regimes.lelv": ["entropy < -1"],
        "regimes.helv": ["entropy < -1"],
        "regimes.lehv": ["entropy > 0.5"],
        "branch.min_p": 0.0,
        "branch.top_p": 1.0,
        "branch.depth": 4,
        "branch.margin": 1000.0,
        "branch.per_row": 4,
    }
)


class Person(Shown):
    """An `ask` hook that always gives the same answer and checks its arguments."""

    def __init__(self, model: LanguageModel, answer: int | None, **options: Any) -> None:
        super().__init__(model, ask=lambda row, texts: self.ask(row, texts), **options)
        self.answer = answer
        self.asked: list[tuple[int, list[str]]] = []

    def ask(self, row: int, texts: Sequence[str]) -> int | None:
        assert row == 0
        assert len(texts) == 2
        assert texts[0] != texts[1]
        known = self.generation.rows[0]
        assert self.shown == known.text
        self.asked.append((len(known.tokens), [*texts]))
        return self.answer


def test_ask_is_not_called_for_clear_choices(model: LanguageModel) -> None:
    person = Person(model, 1, sampler=FORKING.with_values({"branch.margin": 0.0}))
    branches = [token.ambiguous for token in person.run().tokens if token.branches is not None]
    assert (person.asked, branches) == ([], [False] * 4)


@pytest.mark.parametrize("answer", [None, 0, 1])
@pytest.mark.parametrize("whole", [True, False])
def test_ask_chooses_between_close_branches(
    model: LanguageModel, answer: int | None, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = FORKING.with_values({"branch.commit_all": whole})
    person = Person(model, answer, sampler=sampler)
    row = person.run()
    assert len(person.asked) == 4
    for at, texts in person.asked:
        branches = row.tokens[at].branches
        assert branches is not None
        assert row.tokens[at].ambiguous
        best = sorted(branches, key=lambda branch: -(branch.score or 0.0))
        assert [branch.text for branch in best[:2]] == texts
        assert [branch.chosen for branch in best].index(True) == (answer or 0)
        tokens = best[answer or 0].tokens[: None if whole else 1]
        assert ids_of(row)[at : at + len(tokens)] == tokens
    assert sum(token.branches is not None for token in row.tokens) == 4
    assert len(row.tokens) == TOKENS
    # Without `ask`, the better branch is chosen, and the choice is still marked as ambiguous.
    (alone,) = run(model, requests([ids(5)]), sampler=sampler)
    assert all(token.ambiguous for token in alone.tokens if token.branches is not None)
    assert (ids_of(alone) == ids_of(row)) == (answer != 1)
    set_pace(monkeypatch, 3)
    again = Person(model, answer, sampler=sampler)
    assert same(again.run(), row)
    assert again.asked == person.asked


def test_timings_exclude_the_time_in_ask(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    person = Person(model, 0, sampler=FORKING)
    clock = time.perf_counter
    lost = 0.0
    ask = person.ask

    def slowly(row: int, texts: Sequence[str]) -> int | None:
        nonlocal lost
        lost += 3600.0
        return ask(row, texts)

    person.ask = slowly  # type: ignore[method-assign]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + lost)
    person.run()
    assert lost == 4 * 3600
    assert 0 < person.generation.timings["total"] < 3600


def test_a_stop_string_ends_the_row_before_an_error(model: LanguageModel, tmp_path: Path) -> None:
    """The completing token was held back as retractable, and the logits after it are not finite."""
    # Nearly every token is MID: sampled at once, but still retractable.
    bounds = {f"regimes.{box}": ["entropy < -1"] for box in BOXES}
    sampler = load_sampler(LITERAL).with_values({**bounds, "regimes.hehv": ["entropy > 6"]})
    generation = run_specs(model, requests([ids(20)]), sampler, ignore_eos=True)
    met = [event.token.token_id for event in generation if event.token is not None]
    (whole,) = generation.rows
    seen = ids_of(whole)
    at = next(
        i
        for i, token in enumerate(whole.tokens)
        if i > 3
        and token.action == "adaptive"
        and met.count(token.token_id) == 1
        and len(token.text) > 1
        and token.text not in "".join(t.text for t in whole.tokens[:i])
    )
    broken = load(str(write_model(tmp_path, poisoned(seen[at]))))
    (failed,) = run(broken, requests([ids(20)]), sampler=sampler)
    assert (failed.finish_reason, len(failed.tokens)) == ("error", at + 1)
    (row,) = run(broken, requests([ids(20)]), sampler=sampler, stop=whole.tokens[at].text)
    assert (row.finish_reason, row.error) == ("stop", None)
    assert ids_of(row) == seen[: at + 1]
    assert row.text == "".join(token.text for token in whole.tokens[:at])

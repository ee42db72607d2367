"""When thinking ends: every token against an oracle that knows the next one from the last."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import entropix_jax
from entropix_jax.engine.state import FINISHED_EOS, FINISHED_LENGTH
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from tests.support.chains import BOUNDS, CONFIG, TYPES, Chain, chain
from tests.support.reference import entropy_bits
from tests.support.samplers import BATCH, LITERAL, Job, generate, params_of

BUDGET = 24
# Texts are bytes, of which "b" is an end token.
CHOICES: Mapping[str, Sequence[Any]] = {
    "think_end.text": ["xyz", "d", ""],
    "think_end.entropy": [0.5, 2.0, 4.5],
    "think_end.patience": [0, 1, 2, 3],
    "budget_forcing.end": ["de", "d", "", "cb"],
    "budget_forcing.wait": ["ca", "a", ""],
    "budget_forcing.min_tokens": [0, 14, 20],
    "budget_forcing.max_tokens": [0, 0, 0, 5, 15],
    "budget_forcing.times": [1, 2, 100],
    # A text with a token that is never drawn is not written.
    "draw.bans": [[], [], [], [ord("y")], [ord("a"), ord("e")]],
    "draw.bias": [[], [], [[ord("d"), -100]], [[ord("x"), -99], [ord("c"), 3]]],
}
TEXTS = ("think_end.text", "budget_forcing.end", "budget_forcing.wait")


def random_values(rng: np.random.Generator) -> dict[str, Any]:
    return {key: choices[int(rng.integers(len(choices)))] for key, choices in CHOICES.items()}


def ends_of(model: Chain) -> list[int]:
    """End tokens, two of which are likely somewhere."""
    return [ord("b"), *(int(np.argmax(model.logits(token))) for token in (0, TYPES // 2))]


def expected(model: Chain, prompt: int, v: Mapping[str, Any]) -> tuple[list[int], str, bool]:
    """The tokens of a row that takes the likeliest, what each is there for (an argmax, think_end,
    budget forcing to wait or to end), and whether an end token was the last."""
    row: list[int] = []
    queue: list[int] = []
    told = why = ""
    calm, waited, ends = 0, 0, ends_of(model)
    never = {*v["draw.bans"], *(token for token, bias in v["draw.bias"] if bias == -100)}

    def likeliest(last: int) -> int:
        logits = model.logits(last).copy()
        for token, bias in v["draw.bias"]:
            logits[token] += bias
        logits[v["draw.bans"]] = -np.inf
        return int(np.argmax(logits))

    def may(text: list[int]) -> bool:
        return bool(text) and not never & {*text}

    def has(text: list[int]) -> bool:
        return any(row[i : i + len(text)] == text for i in range(len(row) - len(text) + 1))

    over, end, wait = ([*v[key].encode()] for key in TEXTS)
    while len(row) < BUDGET and not (row and row[-1] in ends):
        last = row[-1] if row else prompt
        token = likeliest(last)
        if not queue:
            stops = token in ends or [token] == end[:1]
            early = stops and len(row) < v["budget_forcing.min_tokens"]
            late = 0 < v["budget_forcing.max_tokens"] <= len(row)
            why = "a"
            if 0 < v["think_end.patience"] <= calm and may(over) and not has(over):
                queue, why = [*over], "t"
            elif end and has(end):
                pass
            elif late and may(end):
                queue, why = [*end], "e"
            elif early and not late and may(wait) and waited < v["budget_forcing.times"]:
                queue, why = [*wait], "w"
                waited += 1
        quiet = entropy_bits(np.exp(model.heard(last, 0))) < v["think_end.entropy"]
        calm = calm + 1 if quiet and not queue else 0
        row.append(queue.pop(0) if queue else token)
        told += why
    return row, told, row[-1] in ends


def test_any_row() -> None:
    """Each row of a batch by its own texts and limits."""
    reached = dict.fromkeys("atew", 0)
    ended = banned = 0
    rng = np.random.default_rng(0)
    for seed in range(8):
        model = chain(rng.choice(["lelv", "lelv", "helv", "lehv", "mid"], TYPES).tolist(), seed)
        values = [random_values(rng) for _ in range(BATCH)]
        prompts = rng.integers(0, TYPES, BATCH).tolist()
        jobs = [
            Job([prompt], params_of("greedy", v), budget=BUDGET, row_id=str(i))
            for i, (prompt, v) in enumerate(zip(prompts, values, strict=True))
        ]
        found = generate((CONFIG, model.params), jobs, eos_ids=ends_of(model))
        for lines, prompt, v in zip(found, prompts, values, strict=True):
            tokens, told, stopped = expected(model, prompt, v)
            assert [line.token for line in lines] == tokens
            names = {"a": "argmax", "t": "think_end", "e": "budget_forcing", "w": "budget_forcing"}
            assert [line.action for line in lines] == [names[why] for why in told]
            assert lines[-1].finish == (FINISHED_EOS if stopped else FINISHED_LENGTH)
            ended += stopped
            allowed = {
                **v,
                "draw.bans": [],
                "draw.bias": [[t, max(b, -99)] for t, b in v["draw.bias"]],
            }
            banned += told != expected(model, prompt, allowed)[1]
            for why in told:
                reached[why] += 1
    assert min(reached.values()) > 15
    assert 10 < ended < 60
    assert banned >= 5


def test_beside_branches_and_retractions() -> None:
    """They act in the rows of the default sampler, too, and no more often than they may."""
    model = chain(np.resize(["lelv", "lehv", "lelv", "hehv", "mid"], TYPES).tolist())
    changes = {
        "budget_forcing.wait": "ca",
        "budget_forcing.min_tokens": BUDGET,
        "budget_forcing.times": 2,
        "think_end.text": "xyz",
        "think_end.patience": 1,
    }
    sampler = params_of(LITERAL, {**BOUNDS, "loop.max_period": 0, **changes})
    jobs = [Job([i], sampler, budget=BUDGET, row_id=str(i)) for i in range(BATCH)]
    found = generate((CONFIG, model.params), jobs, eos_ids=ends_of(model))
    actions = [line.action for lines in found for line in lines]
    assert {"branch", "backspace", "think_end"} <= {*actions}
    for lines in found:
        assert sum(line.action == "think_end" for line in lines) <= len("xyz")
        assert sum(line.action == "budget_forcing" for line in lines) <= 2 * len("ca")


def test_as_a_user_sees_it(tiny: LanguageModel) -> None:
    """End tokens are those of the request."""
    words = {"budget_forcing.wait": " and", "budget_forcing.min_tokens": 12}
    sampler = load_sampler("greedy").with_values(words)
    options: dict[str, Any] = {"max_new_tokens": 30, "chat": False}
    (plain,) = entropix_jax.generate(tiny, "Tom", load_sampler("greedy"), **options)
    (row,) = entropix_jax.generate(tiny, "Tom", sampler, **options)
    assert plain.finish_reason == "eos"
    assert row.text.startswith(plain.text + " and")
    assert row.to_json()["actions"]["budget_forcing"] >= 1

"""Rules, transforms and arms of one's own: in mixed batches, and from the command line."""

import re
import runpy
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import entropix_jax
from entropix_jax.__main__ import main
from entropix_jax.engine.api import Generation
from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.decode import decode
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Rows
from entropix_jax.engine.slots import fresh_tally
from entropix_jax.engine.state import Recording
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.names import BOXES
from entropix_jax.sampler.context import Context, draw
from entropix_jax.sampler.control import end, force, fork, rewind
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.presets import code_identity, load_sampler
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.state import Proposal
from tests.support.samplers import LITERAL

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MIROSTAT_2 = runpy.run_path(str(EXAMPLES / "mirostat_2.py"))["MIROSTAT_2"]


def even(logits: jax.Array, ctx: Context) -> jax.Array:
    """Tokens of even number."""
    token = jnp.arange(logits.shape[0], dtype=jnp.int32)
    return jnp.where(token % 2 == 0, logits, -jnp.inf)


def no_echo(logits: jax.Array, ctx: Context) -> jax.Array:
    """Never the last token again, nor, once the distribution is sharp, token 5."""
    last = ctx.history[ctx.length - 1]
    logits = logits.at[last].set(-jnp.inf)
    return jnp.where(ctx.metrics.entropy < 1.0, logits.at[5].set(-jnp.inf), logits)


PLAIN = load_sampler("temperature").with_mechanism(MIROSTAT_2).with_truncation("even", even)
PLAIN = PLAIN.with_logits("no_echo", no_echo).with_values({"truncation.rule": "nucleus"})


def requests(model: LanguageModel) -> list[Request]:
    """Rows of all rules, several settings of one among them."""
    changes: list[dict[str, Any]] = [
        {},
        {"truncation.rule": "even"},
        {"truncation.rule": "mirostat_2"},
        {"truncation.rule": "mirostat_2", "mirostat_2.target": 0.5, "mirostat_2.rate": 1.0},
        {"truncation.rule": "eta"},
        {"repetition.penalty": 1.5},
    ]
    prompt = model.tokenizer.encode("Once", add_bos=True)
    samplers = [
        entropix_jax.calibrate_sampler(PLAIN.with_values({**one, "base.temperature": 1.3}), model)
        for one in changes
    ]
    return [
        Request(prompt, sampler, max_new_tokens=24, row_id=str(number))
        for number, sampler in enumerate(samplers)
    ]


def run(model: LanguageModel, requests: list[Request], slots: int) -> dict[str, list[int]]:
    """The tokens of each row."""
    rows = {
        event.row.request.row_id: event.row
        for event in Engine(model, slots=slots, capacity=64).run(requests)
    }
    return {row_id: [token.token_id for token in row.tokens] for row_id, row in rows.items()}


def test_each_row_is_drawn_by_its_own(tiny: LanguageModel) -> None:
    """And by no other row's rule, in slots in which the rules arrive one after another."""
    everything = requests(tiny)
    tokens = run(tiny, everything, slots=3)
    assert len({tuple(own) for own in tokens.values()}) == len(everything)
    assert all(token % 2 == 0 for token in tokens["1"])
    assert any(token % 2 for token in tokens["0"])
    for own in tokens.values():  # the transform is every row's
        assert all(one != other for one, other in pairwise(own))


@pytest.mark.parametrize("verdict", [fork, force])
def test_a_verdict_without_tokens_commits_the_drawn_one(tiny: LanguageModel, verdict: Any) -> None:
    nothing = Mechanism("nothing", control=lambda ctx, token: verdict(jnp.full(3, -1)))
    plain = load_sampler("min-p")
    rows = [
        entropix_jax.generate(tiny, "Once", sampler, max_new_tokens=12, ignore_eos=True)[0]
        for sampler in (plain, plain.with_mechanism(nothing))
    ]
    told = [[(token.token_id, token.action) for token in row.tokens] for row in rows]
    assert told[0] == told[1]


def test_mirostat_2_steers_to_its_target(tiny: LanguageModel) -> None:
    """Compares the kept tokens and the learned state with the algorithm in plain Python."""
    sampler = load_sampler("temperature").with_mechanism(MIROSTAT_2)
    sampler = sampler.with_values(
        {"truncation.rule": "mirostat_2", "mirostat_2.target": 1.0, "base.temperature": 1.0}
    )
    programs = []
    for target in (1.0, 0.5, 2.0):
        changed = sampler.with_values({"mirostat_2.target": target})
        (row,) = entropix_jax.generate(
            tiny, "Once", changed, max_new_tokens=40, ignore_eos=True, recording=Recording(top=1)
        )
        programs.append(decode._cache_size())  # type: ignore[attr-defined]
        mu = 2.0 * target
        for token in row.tokens:
            assert token.top is not None
            surprise = -token.logprob / np.log(2)
            assert surprise <= mu + 1e-4 or token.token_id == token.top[0][0]
            mu -= 0.1 * (surprise - target)
    assert programs[1] == programs[2]  # settings are traced


def test_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file may name what a plugin has; without the plugin it is refused, in one line."""
    for folder in (EXAMPLES, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    (tmp_path / "own_broken.py").write_text("1 / 0")
    (tmp_path / "own_wrong.py").write_text("MECHANISMS = [1]")
    file = tmp_path / "own.toml"
    file.write_text(
        'extends = "temperature"\n[truncation]\nrule = "mirostat_2"\n[mirostat_2]\ntarget = 1.5\n'
    )
    arguments = ["--model", "tiny", "--prompt", "Once", "--max-new-tokens", "8"]
    assert main(["generate", *arguments, "--sampler", str(file), "--plugin", "mirostat_2"]) == 0
    capsys.readouterr()
    for plugin, problem in (
        ([], "no sampler key 'mirostat_2.target'"),
        (["--plugin", "no_such_module"], "no module 'no_such_module': give its name without .py"),
        (["--plugin", "own_wrong"], "own_wrong: has no MECHANISMS"),
        (["--plugin", "own_broken"], "own_broken: cannot be imported: ZeroDivisionError"),
    ):
        assert main(["generate", *arguments, "--sampler", str(file), *plugin]) == 2
        assert problem in capsys.readouterr().err
    sys.modules.pop("mirostat_2", None)


def test_reloaded_classes_are_not_taken_for_one() -> None:
    """JAX calls the structures of their states equal, so a compiled function may return a state of
    the class that it was traced with."""
    again = runpy.run_path(str(EXAMPLES / "mirostat_2.py"))["MIROSTAT_2"]
    tallies = [fresh_tally((*MECHANISMS, own)) for own in (MIROSTAT_2, again)]
    structures: Any = [jax.tree.structure(tally) for tally in tallies]
    assert structures[0] != structures[1]
    same: Any = jax.tree.structure(fresh_tally((*MECHANISMS, MIROSTAT_2)))
    assert structures[0] == same


def test_a_run_that_is_continued_knows_its_mechanisms() -> None:
    """By the source files that they are from; without any there is nothing to know."""
    assert code_identity(load_sampler(LITERAL).mechanisms) == {}
    one = code_identity(load_sampler(LITERAL).with_logits("no_echo", no_echo).mechanisms)
    other = code_identity(load_sampler(LITERAL).with_mechanism(Mechanism("x")).mechanisms)
    assert one.keys() == other.keys() == {"mechanisms"}
    assert one != other


def test_names_that_are_taken() -> None:
    for name, problem in (("eta", "a mechanism 'eta'"), ("base", "a section 'base'")):
        with pytest.raises(UserError, match=f"there is {problem} already"):
            load_sampler(LITERAL).with_logits(name, no_echo)
    with pytest.raises(UserError, match=r"truncation\.rule = 'no_echo': must be one of"):
        PLAIN.with_values({"truncation.rule": "no_echo"})
    with pytest.raises(UserError, match=r"arms\.mid = 'even': must be one of"):
        PLAIN.with_values({"arms.mid": "even"})


def test_mistakes_of_a_users_function_are_one_line(tiny: LanguageModel) -> None:
    """The error names the function and the place for exceptions and for results of a wrong
    type."""

    def kept(logits: jax.Array, *_: Any) -> jax.Array:
        return logits > 0  # a mask

    def nothing(*_: Any) -> Any:
        return None

    takes_one: Any = partial(lambda logits: logits)
    plain, vocab = load_sampler("temperature"), tiny.config.vocab_size
    wrong = {
        f"mechanism 'half': `logits` must return float32 [{vocab}], not float32 [{vocab // 2}]": (
            plain.with_logits("half", lambda logits, *_: logits[: vocab // 2])
        ),
        f"mechanism 'sure': `rule` must return float32 [{vocab}], not bool [{vocab}]": (
            plain.with_truncation("sure", kept)
        ),
        f"mechanism 'none': `rule` must return float32 [{vocab}], not NoneType": (
            plain.with_truncation("none", nothing)
        ),
        "mechanism 'arm': `propose` must return Proposal, not NoneType": (
            plain.with_arm("arm", nothing).with_values({"arms.mid": "arm"})
        ),
        "mechanism 'one': `logits`: TypeError: ": plain.with_logits("one", takes_one),
    }
    for message, sampler in wrong.items():
        with pytest.raises(UserError, match=re.escape(message)):
            run_once(tiny, sampler)
    # A branch on a traced value gives its own line, and only the first line of JAX's message.
    with pytest.raises(UserError) as told:
        run_once(tiny, plain.with_logits("branches", branches))
    assert str(told.value).startswith("mechanism 'branches': `logits`: TracerBoolConversionError: ")
    assert str(told.value).endswith(f"({__file__}, line {branches.__code__.co_firstlineno + 1})")
    assert "\n" not in str(told.value)


def branches(logits: jax.Array, ctx: Context) -> jax.Array:
    return logits if ctx.metrics.entropy > 1 else -logits


def run_once(model: LanguageModel, sampler: Sampler) -> None:
    run(model, [Request([1, 2], calibrate_sampler(sampler, model), max_new_tokens=1)], slots=1)


ONE, NO = jnp.int32(1), jnp.float32(0.0)
CTX = SimpleNamespace(states={"own": NO})


def proposal(temperature: Any) -> Proposal:
    return Proposal(ONE, temperature, ONE, NO, NO, ONE)


@pytest.mark.parametrize(
    ("part", "valid", "wrong", "message"),
    [
        ("propose", proposal(NO), proposal(jnp.zeros(3)), "Proposal with 0 axes in `temperature`"),
        ("control", rewind(ONE), rewind(jnp.ones(2, int)), "Verdict with 0 axes in `back`"),
        ("may", jnp.bool_(True), jnp.ones(2, bool), "bool [], not bool [2]"),
        ("holds", ONE, NO, "int32 [], not float32 []"),
        ("advance", NO, jnp.zeros(2), "float32 [], not float32 [2]"),
        ("advance", NO, {"a": NO}, "float32 [], not dict(float32 [])"),
        ("learn", NO, ONE, "float32 [], not int32 []"),
    ],
)
def test_results_are_checked(part: str, valid: Any, wrong: Any, message: str) -> None:
    def of(result: Any) -> Callable[..., Any]:
        parts: dict[str, Any] = {part: lambda *arguments: result}
        function: Callable[..., Any] = getattr(Mechanism("own", **parts).guarded(), part)
        return function

    arguments = {"learn": (None, CTX), "control": (CTX, ONE)}.get(part, (CTX,))
    assert of(valid)(*arguments) is valid
    with pytest.raises(UserError, match=re.escape(f"mechanism 'own': `{part}` must return ")):
        of(wrong)(*arguments)
    with pytest.raises(UserError, match=re.escape(message)):
        of(wrong)(*arguments)


# The example of docs/adding-an-arm.md, and a mechanism that ends the row

# Every step is HEHV, and nothing loops.
LOST = {f"regimes.{box}": ["entropy < -1"] for box in BOXES} | {
    "regimes.hehv": ["entropy > -1"],
    "loop.max_period": 0,
}


SAMPLER = (
    load_sampler(LITERAL)
    .with_mechanism(runpy.run_path(str(EXAMPLES / "change_course.py"))["CHANGE_COURSE"])
    .with_mechanism(
        Mechanism(
            "give_up",
            lambda ctx: draw("give_up", ctx, temperature=0.0),
            control=lambda ctx, token: end(),
        )
    )
    .with_values({**LOST, "arms.hehv": "change_course", "change_course.words": " is"})
)


# Rows whose text starts after different numbers of tokens, and one that ends.
CHANGES: list[dict[str, Any]] = [
    {},
    {"change_course.patience": 1},
    {"change_course.patience": 5, "change_course.words": " and then"},
    {"arms.hehv": "give_up"},
]


@pytest.fixture(scope="module")
def rows(tiny: LanguageModel) -> Rows:
    prompt = tiny.tokenizer.encode("Tom", add_bos=True)
    requests = [
        Request(prompt, calibrate_sampler(SAMPLER.with_values(one), tiny), 12, row_id=str(number))
        for number, one in enumerate(CHANGES)
    ]
    return Generation(tiny, requests, recording=Recording(top=1)).run()


def test_a_text_after_so_many_lost_tokens(tiny: LanguageModel, rows: Rows) -> None:
    for row, patience, words in zip(rows, (3, 1, 5), (" is", " is", " and then"), strict=False):
        ids = tiny.tokenizer.encode_within(words)
        expected = (["resample"] * patience + ["change_course"] * len(ids)) * 12
        assert [token.action for token in row.tokens] == expected[:12]
        written = [token.token_id for token in row.tokens if token.action == "change_course"]
        assert written == ([*ids] * 12)[: len(written)]


def test_a_mechanism_may_end_its_row(rows: Rows) -> None:
    """It ends with the token of the step that acts. The other rows continue."""
    (token,) = rows[3].tokens
    assert (token.action, rows[3].finish_reason) == ("give_up", "give_up")
    assert token.top is not None
    assert token.token_id == token.top[0][0]
    assert [len(row.tokens) for row in rows[:3]] == [12, 12, 12]


def test_as_a_user_sees_it(rows: Rows, tmp_path: Path) -> None:
    """Its action has its name in results, traces and pages."""
    counts = rows[0].to_json()["actions"]
    assert [*counts] == ["resample", "change_course"]
    assert counts["resample"] + counts["change_course"] == 12
    rows.save_report(tmp_path / "run.html")
    assert "change_course" in (tmp_path / "run.html").read_text()

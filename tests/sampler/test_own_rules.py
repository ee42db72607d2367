"""Rules and transforms of one's own: in a mixed batch, from a file, and from the command line."""

import re
import runpy
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import entropix_jax
from entropix_jax.cli.generate import main
from entropix_jax.engine.decode import decode
from entropix_jax.engine.engine import Engine
from entropix_jax.engine.preparation import calibrate_sampler
from entropix_jax.engine.results import Request
from entropix_jax.engine.state import Recording
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.names import REGIMES
from entropix_jax.sampler.context import Context, Proposal, draw
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.presets import code_identity, import_mechanisms, load_sampler
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.state import DrawnToken
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
    assert run(tiny, [everything[3]], slots=1) == {"3": tokens["3"]}


def test_mirostat_2_steers_to_its_target(tiny: LanguageModel) -> None:
    """What the rule keeps and what it learns, against the algorithm in plain Python."""
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
    monkeypatch.syspath_prepend(str(EXAMPLES))
    file = tmp_path / "own.toml"
    file.write_text(
        'extends = "temperature"\n[truncation]\nrule = "mirostat_2"\n[mirostat_2]\ntarget = 1.5\n'
    )
    arguments = ["--model", "tiny", "--prompt", "Once", "--max-new-tokens", "8"]
    assert main([*arguments, "--sampler", str(file), "--plugin", "mirostat_2"]) == 0
    capsys.readouterr()
    for plugin, problem in (
        ([], "no sampler key 'mirostat_2.target'"),
        (["--plugin", "no_such_module"], "no module 'no_such_module': give its name, without .py"),
        (["--plugin", "json"], "json: has no MECHANISMS"),
    ):
        assert main([*arguments, "--sampler", str(file), *plugin]) == 2
        assert problem in capsys.readouterr().err
    sys.modules.pop("mirostat_2", None)


@struct.dataclass
class Count:
    """Of one row."""

    tokens: jax.Array


def test_an_arm_that_learns(tiny: LanguageModel) -> None:
    """Its state counts the tokens; a rule that an arm names does not take the sampler's place."""

    def other_rule(ctx: Context) -> Proposal:
        proposal = draw("counts", ctx, temperature=0.0)
        return replace(proposal, rule=jnp.int32(ctx.settings.action("top_n_sigma")))

    def learn(drawn: DrawnToken, ctx: Context) -> Count:
        return Count(tokens=ctx.own["counts"].tokens + 1)

    counts = Mechanism("counts", other_rule, init=lambda: Count(jnp.int32(0)), learn=learn)
    sampler = load_sampler("temperature").with_mechanism(counts)
    sampler = sampler.with_values({f"arms.{regime}": "counts" for regime in REGIMES})
    likeliest = entropix_jax.generate(tiny, "Once", "greedy", max_new_tokens=9)
    (row,) = entropix_jax.generate(
        tiny, "Once", sampler, max_new_tokens=9, recording=Recording(state=True)
    )
    states = [token.state.own["counts"].tokens for token in row.tokens if token.state is not None]
    assert states == [*range(1, 10)]
    assert row.text == likeliest[0].text


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


def test_importing_needs_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_broken.py").write_text("1 / 0")
    with pytest.raises(UserError, match="own_broken: cannot be imported: ZeroDivisionError"):
        import_mechanisms("own_broken")
    (tmp_path / "own_wrong.py").write_text("MECHANISMS = [1]")
    with pytest.raises(UserError, match="own_wrong: has no MECHANISMS"):
        import_mechanisms("own_wrong")


def test_mistakes_of_a_users_function_are_one_line(tiny: LanguageModel) -> None:
    """One that fails, or returns something else than it should, is told of by its name, and where
    it failed."""

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
        "mechanism 'none': `rule` must return an array, not NoneType": (
            plain.with_truncation("none", nothing)
        ),
        "mechanism 'arm': `propose` must return a Proposal, not NoneType": (
            plain.with_arm("arm", nothing).with_values({"arms.mid": "arm"})
        ),
        "mechanism 'one': `logits`: TypeError: ": plain.with_logits("one", takes_one),
    }
    for message, sampler in wrong.items():
        with pytest.raises(UserError, match=re.escape(message)):
            run_once(tiny, sampler)
    # A branch on a traced value: its own line is told, and only the first line of JAX's reasons.
    with pytest.raises(UserError) as told:
        run_once(tiny, plain.with_logits("branches", branches))
    assert str(told.value).startswith("mechanism 'branches': `logits`: TracerBoolConversionError: ")
    assert str(told.value).endswith(f"({__file__}, line {branches.__code__.co_firstlineno + 1})")
    assert "\n" not in str(told.value)


def branches(logits: jax.Array, ctx: Context) -> jax.Array:
    return logits if ctx.metrics.entropy > 1 else -logits


def run_once(model: LanguageModel, sampler: Sampler) -> None:
    run(model, [Request([1, 2], calibrate_sampler(sampler, model), max_new_tokens=1)], slots=1)

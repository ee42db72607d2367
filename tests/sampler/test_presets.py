"""Sampler files: what loads, what is refused with which words, and where each value ends up."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.errors import UserError
from entropix_jax.host.resources import resource_folder
from entropix_jax.model.loading import CALIBRATION_FILE
from entropix_jax.names import BOXES, REGIMES
from entropix_jax.sampler.mechanisms.inject import MAX_THOUGHT, MAX_THOUGHTS
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.presets import load_sampler, parse_setting, preset_names
from entropix_jax.sampler.proposal import Proposal, RowView, draw
from entropix_jax.sampler.sampler import Sampler, scalars
from entropix_jax.sampler.settings import MAX_BANS, RULES, SamplerSettings
from entropix_jax.sampler.step import propose
from tests.support.samplers import (
    ARMS,
    EPSILON,
    calibrated,
    encode,
    metrics_of,
    other_value,
    params_of,
    view,
)

ENTROPIX = load_sampler("entropix")
BASELINES = (
    "greedy",
    "temperature",
    "top-k",
    "top-p",
    "min-p",
    "top-n-sigma",
    "typical",
    "eta",
    "edt",
    "mirostat",
)


def write(folder: Path, text: str, name: str = "mine.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def refused(path: str) -> str:
    with pytest.raises(UserError) as caught:
        load_sampler(path)
    return str(caught.value)


# The files that come with the package


@pytest.mark.parametrize("name", preset_names())
def test_presets_load(name: str) -> None:
    sampler = load_sampler(name)
    assert sampler.name == name
    assert sampler.description
    params = params_of(name)
    assert params.layer_weights.tolist() == [1.0, 1.0]  # every preset: all layers
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} <= {
        np.dtype(kind) for kind in (bool, np.int32, np.float32)
    }


def test_preset_names_are_those_of_the_folder() -> None:
    files = sorted(path.name for path in resource_folder("configs").iterdir() if path.is_file())
    assert files == [f"{name}.toml" for name in preset_names()]
    documents = {"document-000", "document-001", "document-004"}
    assert {"entropix", *documents, *BASELINES} == {*preset_names()}


def test_entropix_corrects_what_the_documents_print() -> None:
    metrics = {"metrics.attn_entropy": ("normalised", "raw"), "metrics.agreement": ("corrected",)}
    for key, (corrected, *_) in metrics.items():
        assert ENTROPIX.values[key] == corrected
    document = load_sampler("document-001").values
    assert document["metrics.attn_entropy"] == "raw"
    assert document["metrics.agreement"] == "published"
    assert (document["inject.thought"], document["inject.cooldown"]) == (" ...", 1)
    assert document["loop.max_period"] * document["loop.repeats"] == 0
    base = [ENTROPIX.values[f"base.{k}"] for k in ("temperature", "top_p", "top_k", "min_p")]
    assert base == [0.666, 0.90, 27, 0.03]
    # Where the documents draw, it branches and takes back.
    arms = [ENTROPIX.values[f"arms.{regime}"] for regime in REGIMES]
    assert arms == ["argmax", "inject", "branch", "backspace", "adaptive"]
    arms = [document[f"arms.{regime}"] for regime in REGIMES]
    assert arms == ["argmax", "inject", "explore", "resample", "adaptive"]
    assert ENTROPIX.values["loop.max_period"] * ENTROPIX.values["loop.repeats"] > 0


def test_document_000_is_001_with_five_candidates() -> None:
    one, zero = load_sampler("document-001").values, load_sampler("document-000").values
    assert {key for key in one if one[key] != zero[key]} == {"adaptive.draws"}


# Where each value ends up


@pytest.mark.parametrize("key", scalars())
def test_every_scalar_reaches_its_place(key: str) -> None:
    """It changes its own leaf, to its own value, and no other leaf."""
    section, name = key.split(".")
    value = other_value(key, ENTROPIX.values[key])
    before, after = params_of("entropix"), params_of("entropix", {key: value})

    def leaf(settings: SamplerSettings) -> np.ndarray:
        own = {**vars(settings), **settings.own}
        return getattr(own[section], name)

    assert leaf(after) == value != leaf(before)
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    assert sum(not np.array_equal(one, other) for one, other in pairs) == 1


def test_all_else_reaches_its_place() -> None:
    changes = {
        "regimes.lelv": ["entropy < h1", "agreement > 0.25"],
        "regimes.helv": ["varentropy > u1", "varentropy > 1", "varentropy < 5e0", "varentropy < 7"],
        "arms.lelv": "sample",
        "arms.mid": "explore",
        "metrics.attn_entropy": "raw",
        "metrics.agreement": "published",
        "metrics.layers": [0, 2.5],
        "metrics.noise_floor": True,
        "inject.thought": "abc",
        "truncation.rule": "eta",
        "draw.bans": [4, 0],
        "thresholds.h1": 0.5,
    }
    params = params_of("entropix", changes)
    inf = np.inf
    np.testing.assert_array_equal(params.low[0], [-inf, -inf, -inf, 0.25])
    np.testing.assert_array_equal(params.high[0], [0.5, inf, inf, inf])
    np.testing.assert_array_equal(params.low[1], np.array([-inf, 1.2, -inf, -inf], np.float32))
    np.testing.assert_array_equal(params.high[1], [inf, 5, inf, inf])
    names = ["sample", "inject", "branch", "backspace", "explore"]
    assert [ARMS[i] for i in params.arms] == names
    assert not params.attn_entropy_normalised
    assert params.agreement_published
    assert params.layer_weights.tolist() == [0, 2.5]
    assert params.noise_epsilon == EPSILON
    assert params.truncation.rule == RULES.index("eta")
    assert params.bans.tolist() == [4, 0] + [-1] * (MAX_BANS - 2)
    plain = params_of("entropix")
    assert plain.truncation.rule == RULES.index("nucleus")
    assert plain.noise_epsilon == 0
    assert plain.attn_entropy_normalised
    assert not plain.agreement_published
    assert params_of("entropix", {"metrics.layers": "last"}).layer_weights.tolist() == [0, 1]


def nothing_for_x(text: str) -> list[int]:
    """A tokenizer that has no token for "x"."""
    return encode(text.replace("x", ""))


@pytest.mark.parametrize(
    ("thought", "encoded"),
    [
        ("abc", [b"abc"]),
        ("", []),
        ([], []),
        ([""], []),
        (["a", "bcd", "a", "e"], [b"a", b"bcd", b"a", b"e"]),
        (["", "a", "", "b"], [b"a", b"b"]),  # those that say nothing come last
        ("x", []),
        (["x", "a"], [b"a"]),
        ("é" * 32, ["é".encode() * 32]),
    ],
)
def test_thoughts_reach_their_places(thought: Any, encoded: list[bytes]) -> None:
    inject = params_of("entropix", {"inject.thought": thought}, encode=nothing_for_x).own["inject"]
    assert inject.thought.shape == (MAX_THOUGHTS, MAX_THOUGHT)
    assert inject.thought.dtype == np.int32
    padded = [*encoded, *[b""] * (MAX_THOUGHTS - len(encoded))]
    for row, text in zip(inject.thought, padded, strict=True):
        assert row.tolist() == [*text, *[-1] * (MAX_THOUGHT - len(text))]


# What is refused


def test_unknown_keys_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"base\.temprature.*did you mean 'base\.temperature'"):
        ENTROPIX.with_values({"base.temprature": 1.0})
    path = write(tmp_path, 'extends = "entropix"\n[expolre]\ntop_k_min = 3\n')
    message = refused(path)
    assert message.startswith(path)
    assert "'expolre.top_k_min', did you mean 'explore.top_k_min'?" in message


def test_unknown_presets_name_the_nearest() -> None:
    assert "did you mean 'entropix'?" in refused("entropics")
    assert "known: document-000" in refused("§§")


PROBLEMS: list[tuple[str, Any, str]] = [
    ("base.temperature", "hot", "must be a number"),
    ("base.temperature", True, "must be a number"),
    ("base.temperature", float("nan"), "must be a number"),
    ("base.temperature", -0.1, r"must lie in \[0.0, 100.0\]"),
    ("base.temperature", float("inf"), "must lie in"),
    ("base.top_k", 1.0, "must be an integer"),
    ("base.top_k", True, "must be an integer"),
    ("base.top_k", -1, "must lie in"),
    ("base.top_k", 2**31, "must lie in"),
    ("base.top_p", 0, "must lie in"),
    ("base.top_p", 1.01, "must lie in"),
    ("inject.until_confident", 1, "must be true or false"),
    ("inject.until_confident", "yes", "must be true or false"),
    ("inject.thought", 5, "must be text, or a list of at most 4 texts"),
    ("inject.thought", True, "must be text"),
    ("inject.thought", ["a", 5], "must be text"),
    ("inject.thought", [["a"]], "must be text"),
    ("inject.thought", {"a": 1}, "must be text"),
    ("inject.thought", ["a"] * 5, "at most 4 texts"),
    ("truncation.rule", "nucelus", "must be one of nucleus, top_n_sigma, typical, eta, mirostat"),
    ("truncation.rule", 0, "must be one of nucleus"),
    ("truncation.rule", ["eta"], "must be one of nucleus"),
    ("truncation.mirostat_target", "low", "must be a number"),
    ("branch.commit_all", 1, "must be true or false"),
    ("loop.max_period", 33, "must lie in"),
    ("loop.repeats", 17, "at most 256"),  # times 16
    ("arms.mid", "branc", "must be one of argmax, "),
    ("arms.mid", ["argmax"], "must be one of"),
    ("metrics.agreement", "raw", "must be one of corrected, published"),
    ("metrics.noise_floor", 1, "must be true or false"),
    ("metrics.layers", "first", 'must be "all", "last" or a list of weights'),
    ("metrics.layers", [], "one that counts"),
    ("metrics.layers", [0, 0], "one that counts"),
    ("metrics.layers", [1, -1], "list of weights"),
    ("metrics.layers", [1, "1"], "list of weights"),
    ("metrics.layers", [1, float("inf")], "list of weights"),
    ("metrics.layers", [1, 1e39], "list of weights"),
    ("metrics.layers", [1e-50, 0], "one that counts"),
    ("metrics.layers", [10**400, 1], "list of weights"),
    ("draw.bans", 3, "token ids"),
    ("draw.bans", [-1], "token ids"),
    ("draw.bans", [1.0], "token ids"),
    ("draw.bans", [2**31], "token ids"),
    ("draw.bans", [*range(MAX_BANS + 1)], f"at most {MAX_BANS} token ids"),
    ("thresholds.calibrated", 1, "must be true or false"),
    ("thresholds.h1", -1, "must lie in"),
    ("thresholds.h1", "low", "must be a number"),
    ("thresholds.h1", 2.6, r"thresholds.h1 = 2.6 is above thresholds.h2 = 2.5"),
    ("thresholds.u2", 1.1, r"thresholds.u1 = 1.2 is above thresholds.u2 = 1.1"),
    ("thresholds.h2", float("inf"), "must lie in"),
    ("thresholds.h2", 10**400, "must lie in"),
    ("regimes.lelv", "entropy < 1", "must be a list of conditions"),
    ("regimes.lelv", [1], "must be a list of conditions"),
    ("regimes.lelv", ["entropy <= 1"], "expected QUANTITY < NUMBER or QUANTITY > NUMBER"),
    ("regimes.lelv", ["entropy"], "expected QUANTITY"),
    ("regimes.lelv", ["0.1 < entropy"], "expected|no quantity"),
    ("regimes.lelv", ["entropi < 1"], "no quantity 'entropi', did you mean 'entropy'"),
    ("regimes.lelv", ["interaction_strength < 1"], "no quantity"),
    (
        "regimes.lelv",
        ["entropy < h3"],
        r"'h3' is neither a number up to 1e\+06 nor one of h1, h2, u1, u2",
    ),
    ("regimes.lelv", ["entropy < nan"], "'nan' is neither"),
    ("regimes.lelv", ["entropy < 1e39"], "'1e39' is neither"),
    ("regimes.lelv", ["entropy > 1", "entropy < 1"], "no entropy is above 1 and below 1"),
    ("regimes.hehv", ["varentropy > u2", "varentropy < u1"], "no varentropy is above 2.5"),
]


@pytest.mark.parametrize(("key", "value", "words"), PROBLEMS)
def test_wrong_values(key: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        ENTROPIX.with_values({"thresholds.calibrated": False, key: value})
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


# What each scalar may be, both ends included. What is not here is a coefficient.


@pytest.mark.parametrize("key", scalars())
def test_a_range_is_what_it_is(key: str) -> None:
    """Both ends are allowed, and nothing past them is; a whole number stays one."""
    low, high, kind = (scalars()[key][name] for name in ("low", "high", "type"))
    # The guard looks 256 tokens back: so many repeats are of single tokens.
    beside = {"loop.repeats": {"loop.max_period": 1}, "loop.max_period": {"loop.repeats": 8}}
    sampler = ENTROPIX.with_values(beside.get(key, {}))
    for end in (low, high):
        assert sampler.with_values({key: end}).values[key] == end
    if kind is bool:
        return
    past = (
        (low - 1, high + 1) if kind is int else (np.nextafter(low, -1e9), np.nextafter(high, 1e9))
    )
    for value in past:
        with pytest.raises(UserError, match="must lie in"):
            sampler.with_values({key: kind(value)})
    if kind is int:
        with pytest.raises(UserError, match="must be an integer"):
            sampler.with_values({key: low + 0.5})


def test_the_model_decides_about_layers_and_thoughts() -> None:
    with pytest.raises(UserError, match="has 3 weights, the model has 2 layers"):
        params_of("entropix", {"metrics.layers": [1, 1, 1]})
    longest = params_of("entropix", {"inject.thought": "x" * 64}).own["inject"].thought
    assert (longest[0] == ord("x")).all()
    for thought in ("x" * 65, ["a", "x" * 65, "x" * 66]):  # the first one that is too long
        with pytest.raises(UserError, match=r"inject\.thought is 65 tokens long, at most 64"):
            params_of("entropix", {"inject.thought": thought})


def test_missing_keys(tmp_path: Path) -> None:
    file = resource_folder("configs") / "entropix.toml"
    text = re.sub(r" *#.*", "", file.read_text(encoding="utf-8"))
    assert load_sampler(write(tmp_path, text)).values == ENTROPIX.values
    for line in ("top_k = 27\n", 'mid = "adaptive"\n', "bans = []\n", "noise_floor = false\n"):
        assert line in text
        message = refused(write(tmp_path, text.replace(line, "")))
        assert line.split(" =")[0] in message
        assert "is missing; 'extends'" in message
    # A threshold is only needed where a condition names it.
    without = text.replace("h2 = 2.5\n", "")
    assert "thresholds.h2 is not given" in refused(write(tmp_path, without))
    path = write(tmp_path, without.replace("h2", "2.75"))
    assert params_of_file(path).high[BOXES.index("lehv"), 0] == 2.75


def params_of_file(path: str) -> Any:
    return load_sampler(path).settings(num_layers=2, epsilon=EPSILON, encode=encode)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base = ", "not valid TOML"),
        ("base = 1\nbase = 2", "not valid TOML"),
        ("x = " + "[" * 5000, "not valid TOML"),
        ("x = " + "1" * 5000, "not valid TOML"),
        (
            'extends = "entropix"\n[base]\ntop_k = 0x' + "f" * 5000,
            "not valid TOML: Exceeds the limit",
        ),
        ('extends = "entropix"\nbase = 3', "no sampler key 'base'"),
        ('extends = "entropix"\nentropy = 3', "no sampler key 'entropy'"),
        ('extends = "entropix"\n[base.top_k]\nx = 3', r"no sampler key 'base.top_k.x'"),
        ('extends = "entropix"\n[base.top_k]', r"'base.top_k' is missing"),
        ('extends = "entropix"\n[[base]]\ntop_k = 1', "no sampler key 'base'"),
        ('extends = "entropix"\ndescription = 3', "'description' must be text"),
        ("extends = 3", "'extends' must be the name of a preset, not 3"),
        (
            'extends = "entropics"',
            r"no sampler preset 'entropics' \(.*\), did you mean 'entropix'",
        ),
        ('extends = "other.toml"', "other.toml: no such file"),
        ('extends = "mine.toml"', "extends itself"),
        ("", "is missing; 'extends'"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        load_sampler(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    assert "no.toml: no such file" in refused(str(tmp_path / "no.toml"))
    (tmp_path / "folder.toml").mkdir()
    assert "cannot be read" in refused(str(tmp_path / "folder.toml"))
    (tmp_path / "latin.toml").write_bytes(b'description = "\xe9"')
    assert "not UTF-8" in refused(str(tmp_path / "latin.toml"))


# An arm of one's own


def cautious(metrics: Metrics, settings: SamplerSettings, row: RowView) -> Proposal:
    """One draw, cooler the more there is to choose from."""
    return draw("sample", settings, temperature=settings.base.temperature / (1.0 + metrics.entropy))


def test_an_arm_of_ones_own() -> None:
    """It stands beside the others, under its name, through all that makes a sampler."""
    sampler = ENTROPIX.with_arm("cautious", cautious).with_values({"arms.mid": "cautious"})
    assert [mechanism.name for mechanism in sampler.mechanisms] == [*ARMS, "cautious"]
    assert calibrated(sampler, Path("nowhere")).mechanisms == sampler.mechanisms
    options: Any = {"num_layers": 2, "epsilon": EPSILON, "encode": encode}
    settings, plain = sampler.settings(**options), params_of("entropix")
    assert settings.arms.tolist() == [*plain.arms[:-1], len(ARMS)]
    point = metrics_of(entropy=3.0)
    own = propose(settings.arms[-1], point, settings, view())
    assert float(own.temperature) == pytest.approx(0.666 / 4)
    for arm in map(jnp.int32, range(len(ARMS))):  # the others are where they were
        one, other = (propose(arm, point, given, view()) for given in (plain, settings))
        assert jax.tree.leaves(one) == jax.tree.leaves(other)
    two = sampler.with_arm("bold", cautious).with_values({"arms.lelv": "bold"}).settings(**options)
    assert [two.arms[0], two.arms[-1]] == [len(ARMS) + 1, len(ARMS)]


def test_arms_are_told_apart_by_their_names() -> None:
    own = ENTROPIX.with_arm("cautious", cautious)
    for name in ("argmax", "edt", "cautious"):
        with pytest.raises(UserError, match=f"'entropix': there is an arm '{name}' already"):
            own.with_arm(name, cautious)
    with pytest.raises(UserError, match=r"arms.mid = 'cauti': must be one of argmax, .*, cautious"):
        own.with_values({"arms.mid": "cauti"})
    # A sampler knows its own arms, and nobody else's.
    with pytest.raises(UserError, match=r"arms.mid = 'cautious': must be one of argmax.*edt$"):
        ENTROPIX.with_values({"arms.mid": "cautious"})
    assert "cautious" not in ARMS


# Files that extend others


def test_a_chain_of_files(tmp_path: Path) -> None:
    write(tmp_path, 'extends = "document-001"\n[base]\ntop_k = 5\ntop_p = 0.5\n', "a.toml")
    (tmp_path / "deeper").mkdir()
    path = write(
        tmp_path / "deeper",
        'description = "last"\nextends = "../a.toml"\n[base]\ntop_p = 0.6\n[draw]\nbans = [3]\n',
        "b.toml",
    )
    sampler = load_sampler(path)
    assert (sampler.name, sampler.description) == ("b", "last")
    expected = dict(load_sampler("document-001").values)
    expected |= {"base.top_k": 5, "base.top_p": 0.6, "draw.bans": [3]}
    assert sampler.values == expected


@pytest.mark.parametrize("second", ["a.toml", "../{folder}/a.toml", "./deeper/../a.toml"])
def test_cycles(tmp_path: Path, second: str) -> None:
    (tmp_path / "deeper").mkdir()
    path = write(tmp_path, 'extends = "b.toml"', "a.toml")
    write(tmp_path, f'extends = "{second.format(folder=tmp_path.name)}"', "b.toml")
    assert refused(path).endswith("extends itself")


def test_a_file_may_bear_the_name_of_a_preset(tmp_path: Path) -> None:
    path = write(tmp_path, 'extends = "entropix"\n[base]\ntop_k = 4', "entropix.toml")
    assert load_sampler(path).values["base.top_k"] == 4


# The command line's settings


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5", 0.5),
        ("5", 5),
        ("-1e3", -1000.0),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('["entropy < 1"]', ["entropy < 1"]),
        ('"5"', "5"),
        ('["a", "b"]', ["a", "b"]),
        ("argmax", "argmax"),
        (" Wait...", " Wait..."),
        ("", ""),
        ("a=b", "a=b"),
        ("5\nx = 3", "5\nx = 3"),
        ("1" * 5000, "1" * 5000),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_settings(text: str, value: Any) -> None:
    key, parsed = parse_setting(f"sampler.base.x={text}")
    assert key == "base.x"
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("text", ["base.top_k=3", "sampler.base.top_k", "sampler", "", "=3"])
def test_settings_of_another_form(text: str) -> None:
    with pytest.raises(UserError, match=r"expected sampler\.KEY=VALUE"):
        parse_setting(text)


# A model's own thresholds


def calibrate(folder: Path, content: Any) -> Sampler:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / CALIBRATION_FILE).write_text(text)
    return calibrated(ENTROPIX, folder)


THRESHOLDS = {"h1": 0.5, "h2": 3.5, "u1": 0.75, "u2": 4}


def test_calibrated_thresholds(tmp_path: Path) -> None:
    sampler = calibrate(tmp_path, {"thresholds": THRESHOLDS, "model": "any"})
    assert sampler.notes == ()
    params = sampler.settings(num_layers=2, epsilon=EPSILON, encode=encode)
    inf = np.inf
    assert params.high[:, 0].tolist() == [0.5, inf, 3.5, inf]
    assert params.low[:, 0].tolist() == [-inf, 3.5, -inf, 3.5]
    assert params.high[:, 1].tolist() == [0.75, 0.75, inf, inf]
    assert params.low[:, 1].tolist() == [-inf, -inf, 4, 4]


def test_a_documents_own_bounds_stay(tmp_path: Path) -> None:
    calibrate(tmp_path, {"thresholds": THRESHOLDS})
    document = load_sampler("document-001")
    assert calibrated(document, tmp_path) == document


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        {},
        {"thresholds": []},
        {"thresholds": {"h1": 1}},
        {"thresholds": THRESHOLDS | {"h3": 1}},
        {"thresholds": THRESHOLDS | {"h1": "1"}},
        {"thresholds": THRESHOLDS | {"h1": None}},
        {"thresholds": THRESHOLDS | {"h1": -1}},
        {"thresholds": THRESHOLDS | {"h1": 9}},
        {"thresholds": THRESHOLDS | {"u2": float("nan")}},
        {"thresholds": THRESHOLDS | {"u2": float("inf")}},
        {"thresholds": THRESHOLDS | {"u2": 10**400}},
    ],
)
def test_damaged_calibrations(tmp_path: Path, content: Any) -> None:
    with pytest.raises(UserError) as caught:
        calibrate(tmp_path, content)
    assert str(tmp_path / CALIBRATION_FILE) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_thresholds_of_ones_own_are_not_calibrated_away(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text(
        '{"thresholds": {"h1": 9, "h2": 9, "u1": 9, "u2": 9}}', encoding="utf-8"
    )
    own = tmp_path / "own.toml"
    own.write_text('extends = "entropix"\n[thresholds]\nh1 = 0.2\n', encoding="utf-8")
    sampler = calibrated(load_sampler(str(own)), tmp_path)
    assert sampler.values["thresholds.h1"] == 0.2
    assert sampler.notes == ()


def test_what_a_user_changed_stands_above_the_calibration(tmp_path: Path) -> None:
    """Whether it was changed before or after, and even where it fits beside no published bound."""
    calibrate(tmp_path, {"thresholds": THRESHOLDS})
    folder = tmp_path
    before = calibrated(ENTROPIX.with_values({"thresholds.h1": 3.0}), folder)
    after = calibrated(ENTROPIX, folder).with_values({"thresholds.h1": 3.0})
    for sampler in (before, after, calibrated(after, folder)):
        assert sampler.values["thresholds.h1"] == 3.0
        assert sampler.values["thresholds.h2"] == 3.5
    with pytest.raises(UserError, match=r"thresholds.h1 = 4.0 is above thresholds.h2 = 3.5"):
        calibrated(ENTROPIX.with_values({"thresholds.h1": 4.0}), folder)


def test_calibration_can_be_switched_off_and_on(tmp_path: Path) -> None:
    calibrate(tmp_path, {"thresholds": THRESHOLDS})
    folder = tmp_path
    off = calibrated(ENTROPIX.with_values({"thresholds.calibrated": False}), folder)
    assert off.values["thresholds.h2"] == 2.5
    assert off.notes == ()
    on = load_sampler("document-001").with_values({"thresholds.calibrated": True})
    assert calibrated(on, folder).values["thresholds.h2"] == 3.5


def test_no_note_where_all_thresholds_are_given(tmp_path: Path) -> None:
    given = {"thresholds.h1": 0.1, "thresholds.h2": 1.0, "thresholds.u1": 0.1, "thresholds.u2": 1.0}
    assert calibrated(ENTROPIX.with_values(given), tmp_path).notes == ()
    assert calibrated(ENTROPIX, tmp_path).notes != ()


def test_a_sampler_cannot_be_changed_behind_its_checks() -> None:
    with pytest.raises(TypeError):
        ENTROPIX.values["base.temperature"] = 50.0  # type: ignore[index]

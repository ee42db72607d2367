"""Sampler files: what loads, what is refused with which words, and where each value ends up."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropix_jax.engine.calibrated import calibration_text
from entropix_jax.errors import UserError
from entropix_jax.host.resources import resource_folder
from entropix_jax.lab.thresholds import preset_text
from entropix_jax.model.loading import CALIBRATION_FILE
from entropix_jax.names import BOXES, REGIMES, THRESHOLDS
from entropix_jax.sampler.mechanisms.dry import MAX_BREAKERS
from entropix_jax.sampler.mechanisms.inject import MAX_THOUGHT, MAX_THOUGHTS
from entropix_jax.sampler.mechanisms.phrases import MAX_PHRASES
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.presets import load_sampler, parse_setting, preset_names
from entropix_jax.sampler.proposal import Proposal, RowView, draw
from entropix_jax.sampler.sampler import Sampler, scalars
from entropix_jax.sampler.settings import LOOP_WINDOW, MAX_BANS, MAX_BIASES, SamplerSettings
from entropix_jax.sampler.step import propose
from tests.support.properties import examples
from tests.support.sampler_strategies import numbers, samplers
from tests.support.samplers import (
    ARMS,
    EPSILON,
    NAMES,
    NUM_LAYERS,
    RULES,
    calibrated,
    encode,
    metrics_of,
    params_of,
    settings_of,
    view,
)

QUADRANTS = load_sampler("quadrants")


def write(folder: Path, text: str, name: str = "mine.toml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def refused(path: str) -> str:
    with pytest.raises(UserError) as caught:
        load_sampler(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# The files that come with the package


@pytest.mark.parametrize("name", preset_names())
def test_presets_load(name: str) -> None:
    sampler = load_sampler(name)
    assert sampler.name == name
    assert sampler.description
    params = params_of(name)
    assert params.layer_weights.tolist() == [1.0, 1.0]  # every preset: all layers
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
    assert kinds <= {"bool", "int32", "float32"}


PRINTED = {
    "lelv": ["entropy < 0.1", "varentropy < 0.1"],
    "helv": ["entropy > 3.0", "varentropy < 0.1"],
    "lehv": ["entropy < 5.0", "varentropy > 5.0"],
    "hehv": ["entropy > 5.0", "varentropy > 5.0"],
}
CALIBRATED = {
    "lelv": ["entropy < h1", "varentropy < u1"],
    "helv": ["entropy > h2", "varentropy < u1"],
    "lehv": ["entropy < h2", "varentropy > u2"],
    "hehv": ["entropy > h2", "varentropy > u2"],
}
QUARTERS = {
    "lelv": ["entropy < h2", "varentropy < u2", "attn_entropy_norm < 0.44", "agreement > 0.65"],
    "helv": ["entropy > h2", "varentropy < u2"],
    "lehv": ["entropy < h2", "varentropy > u2"],
    "hehv": ["entropy > h2", "varentropy > u2", "agreement < 0.65"],
}
OVERLAPPING = {**CALIBRATED, "helv": ["entropy > h1", "varentropy < u2"]}
# Where the documents draw, `entropix` branches and takes back.
DRAWING = ["argmax", "inject", "explore", "resample", "adaptive"]
BRANCHING = ["argmax", "inject", "branch", "backspace"]
# The numbers that documents 000 and 001 print besides T0, and those of the code that they quote.
PRINTED_NUMBERS = {
    "explore": [1.2, 0.3, 1.5, 0.5, 5],
    "resample": [2.0, 0.5, 2.0, 0.2, 0.5],
    "inject": [1.3, 0.2, 1.5],
    "adaptive": [12, 0.3, 0.2, 0.2, 0.1, 0.1, 0.3, 0.2, 1, 100, 0.5, 0.01, 0.5],
    "adaptive.confidence_": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
}


def test_the_bounds_and_arms_of_the_presets() -> None:
    for preset, boxes, arms in (
        ("document-000", PRINTED, DRAWING),
        ("document-001", PRINTED, DRAWING),
        ("document-002", QUARTERS, ["argmax", "inject", "branch", "branch", "sample"]),
        ("document-003", PRINTED, DRAWING),
        ("document-004", OVERLAPPING, [*BRANCHING, "sample"]),
        ("quadrants", CALIBRATED, [*BRANCHING, "adaptive"]),
    ):
        values = load_sampler(preset).values
        assert {box: values[f"regimes.{box}"] for box in BOXES} == boxes
        assert [values[f"arms.{regime}"] for regime in REGIMES] == arms
        if boxes is not PRINTED:
            assert [values[f"thresholds.{name}"] for name in THRESHOLDS] == [0.3, 2.5, 1.2, 2.5]
            assert values["thresholds.calibrated"] is True


def test_entropix_corrects_what_the_documents_print() -> None:
    values, document = QUADRANTS.values, load_sampler("document-001").values
    keys = ("metrics.attn_entropy", "metrics.agreement")
    assert [values[key] for key in keys] == ["normalised", "corrected"]
    assert [document[key] for key in keys] == ["raw", "published"]
    assert (document["inject.thought"], document["inject.cooldown"]) == (" ...", 1)
    base = [values[f"base.{key}"] for key in ("temperature", "top_p", "top_k", "min_p")]
    assert base == [0.666, 0.90, 27, 0.03]
    loops = [v["loop.max_period"] * v["loop.repeats"] > 0 for v in (values, document)]
    assert loops == [True, False]
    zero = load_sampler("document-000").values  # with five candidates
    assert {key for key in zero if document[key] != zero[key]} == {"adaptive.draws"}
    assert document == load_sampler("document-003").values
    for start, printed in PRINTED_NUMBERS.items():
        own = [document[key] for key in scalars() if key.startswith(start)]
        assert own[-3:] == printed if start == "inject" else own[: len(printed)] == printed
    two = load_sampler("document-002").values
    thinks = [two[f"inject.{key}"] for key in ("thought", "until_confident")]
    assert thinks == [" Wait..", True]


# Where each value ends up


def test_values_reach_their_places() -> None:
    """Those that no arm or rule shows in its own tests."""
    changes = {
        "regimes.lelv": ["entropy < h1", "agreement > 0.25"],
        "regimes.helv": ["varentropy > u1", "varentropy > 1", "varentropy < 5e0", "varentropy < 7"],
        "arms.lelv": "sample",
        "arms.mid": "explore",
        "arms.loop": "argmax",
        "metrics.attn_entropy": "raw",
        "metrics.agreement": "published",
        "metrics.layers": [0, 2.5],
        "metrics.noise_floor": True,
        "truncation.rule": "eta",
        "draw.bans": [4, 0],
        "draw.bias": [[7, 100], [0, -0.1]],
        "thresholds.h1": 0.5,
    }
    params, plain = params_of("quadrants", changes), params_of("quadrants")
    inf = np.inf
    assert params.low[:2].tolist() == [
        [-inf, -inf, -inf, 0.25, -inf],
        [-inf, np.float32(1.2), -inf, -inf, -inf],
    ]
    assert params.high[:2].tolist() == [[0.5, inf, inf, inf, inf], [inf, 5, inf, inf, inf]]
    names = ["sample", "inject", "branch", "backspace", "explore", "argmax"]
    assert [ARMS[i] for i in params.arms] == names
    assert params.layer_weights.tolist() == [0, 2.5]
    assert params_of("quadrants", {"metrics.layers": "last"}).layer_weights.tolist() == [0, 1]
    assert params.bans.tolist() == [4, 0] + [-1] * (MAX_BANS - 2)
    assert params.biased.tolist() == [7, 0] + [-1] * (MAX_BIASES - 2)
    assert params.biases.tolist() == [100, np.float32(-0.1)] + [0] * (MAX_BIASES - 2)
    for settings, rule, noise, published in (
        (params, "eta", EPSILON, True),
        (plain, RULES[0], 0, False),
    ):
        assert settings.rule == NAMES.index(rule)
        assert settings.noise_epsilon == noise
        assert settings.agreement_published == published != settings.attn_entropy_normalised


@pytest.mark.parametrize(
    ("thought", "encoded"),
    [
        ("abc", [b"abc"]),
        ([], []),
        (["a", "bcd", "a", "e"], [b"a", b"bcd", b"a", b"e"]),
        (["", "a", "", "b"], [b"a", b"b"]),  # those that say nothing come last
        (["x", "a"], [b"a"]),  # the tokenizer has no token for "x"
        ("é" * 32, ["é".encode() * 32]),
    ],
)
def test_thoughts_reach_their_places(thought: Any, encoded: list[bytes]) -> None:
    changes = {"inject.thought": thought}
    params = params_of("quadrants", changes, encode=lambda text: encode(text.replace("x", "")))
    placed = params.own["inject"].thought
    assert (placed.shape, placed.dtype) == ((MAX_THOUGHTS, MAX_THOUGHT), np.int32)
    padded = [*encoded, *[b""] * (MAX_THOUGHTS - len(encoded))]
    for row, text in zip(placed, padded, strict=True):
        assert row.tolist() == [*text, *[-1] * (MAX_THOUGHT - len(text))]


# What is refused


PROBLEMS: list[tuple[str, Any, str]] = [
    ("base.temprature", 1.0, r"did you mean 'base\.temperature'"),
    ("base.temperature", "hot", "must be a number"),
    ("base.temperature", float("nan"), "must be a number"),
    ("base.top_k", True, "must be an integer"),
    ("inject.until_confident", 1, "must be true or false"),
    ("inject.thought", 5, "must be text, or a list of at most 4 texts"),
    ("inject.thought", ["a"] * 5, "at most 4 texts"),
    ("truncation.rule", "nucelus", f"must be one of {', '.join(RULES)}"),
    ("loop.repeats", 17, "at most 256"),  # times 16
    ("arms.mid", "branc", "must be one of argmax, "),
    ("metrics.layers", "first", 'must be "all", "last" or a list of weights'),
    ("metrics.layers", [], "one that counts"),
    ("metrics.layers", [1e-50, 0], "one that counts"),
    ("metrics.layers", [1, "1"], "list of weights"),
    ("metrics.layers", [10**400, 1], "list of weights"),
    ("draw.bans", [1.0], "token ids"),
    ("draw.bans", [*range(MAX_BANS + 1)], f"at most {MAX_BANS} token ids"),
    ("draw.bias", [[i, 1] for i in range(MAX_BIASES + 1)], f"at most {MAX_BIASES} pairs"),
    ("draw.bias", [[5, 100.1]], r"pairs \[token id, bias in \[-100, 100\]\]"),
    ("draw.bias", [[5, float("nan")]], r"bias in \[-100, 100\]"),
    ("draw.bias", [[5, True]], r"bias in \[-100, 100\]"),
    ("draw.bias", [[5, "1"]], r"bias in \[-100, 100\]"),
    ("draw.bias", [[-1, 1]], "token id"),
    ("draw.bias", [[5]], "pairs"),
    ("draw.bias", [5, 1], "pairs"),
    ("draw.bias", {"5": 1}, "a list of at most"),
    ("draw.bias", [[5, 1], [6, 1], [5, 2]], "each token once"),
    ("thresholds.h1", -1, "must be a number in"),
    ("thresholds.h1", 2.6, r"thresholds.h1 = 2.6 is above thresholds.h2 = 2.5"),
    ("thresholds.h2", 10**400, "must be a number in"),
    ("regimes.lelv", "entropy < 1", "must be a list of conditions"),
    ("regimes.lelv", ["entropy <= 1"], "expected QUANTITY < NUMBER or QUANTITY > NUMBER"),
    ("regimes.lelv", ["entropi < 1"], "no quantity 'entropi', did you mean 'entropy'"),
    ("regimes.lelv", ["entropy < h3"], r"'h3' is neither a number up to 1e\+06 nor one of h1, h2"),
    ("regimes.lelv", ["entropy < nan"], "'nan' is neither"),
    ("regimes.lelv", ["entropy > 1", "entropy < 1"], "no entropy is above 1 and below 1"),
    ("regimes.hehv", ["varentropy > u2", "varentropy < u1"], "no varentropy is above 2.5"),
]


@pytest.mark.parametrize(("key", "value", "words"), PROBLEMS)
def test_wrong_values(key: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        QUADRANTS.with_values({"thresholds.calibrated": False, key: value})
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", scalars())
def test_a_range_is_what_it_is(key: str) -> None:
    """Both ends are allowed, and nothing past them is; a whole number stays one."""
    low, high, kind = (scalars()[key][name] for name in ("low", "high", "type"))
    # The guard looks 256 tokens back: so many repeats are of single tokens.
    beside = {"loop.repeats": {"loop.max_period": 1}, "loop.max_period": {"loop.repeats": 8}}
    sampler = QUADRANTS.with_values(beside.get(key, {}))
    for end in (low, high):
        assert sampler.with_values({key: end}).values[key] == end
    beyond = {
        bool: [],
        int: [low - 1, high + 1],
        float: [float(np.nextafter(low, -1e9)), float(np.nextafter(high, 1e9))],
    }
    for value in beyond[kind]:
        with pytest.raises(UserError, match=r"must be an? (number|integer) in"):
            sampler.with_values({key: value})
    if kind is int:
        with pytest.raises(UserError, match="must be an integer"):
            sampler.with_values({key: low + 0.5})


def test_the_model_decides_about_layers_and_thoughts() -> None:
    with pytest.raises(UserError, match="has 3 weights, the model has 2 layers"):
        params_of("quadrants", {"metrics.layers": [1, 1, 1]})
    longest = params_of("quadrants", {"inject.thought": "x" * 64}).own["inject"].thought
    assert (longest[0] == ord("x")).all()
    for thought in ("x" * 65, ["a", "x" * 65, "x" * 66]):  # the first one that is too long
        with pytest.raises(UserError, match=r"inject\.thought is 65 tokens long, at most 64"):
            params_of("quadrants", {"inject.thought": thought})


def test_missing_keys(tmp_path: Path) -> None:
    file = resource_folder("configs") / "quadrants.toml"
    text = re.sub(r" *#.*", "", file.read_text(encoding="utf-8"))
    for line in ("top_k = 27\n", 'mid = "adaptive"\n', "bans = []\n"):
        assert line in text
        message = refused(write(tmp_path, text.replace(line, "")))
        assert f"{line.split(' =')[0]}' is missing: extend a preset" in message
    # Files from before there were biases have none.
    assert "bias = []\n" in text
    older = load_sampler(write(tmp_path, text.replace("bias = []\n", "")))
    assert older.values == QUADRANTS.values
    assert older.with_values({"draw.bias": [[3, 1]]}).values["draw.bias"] == [[3, 1]]
    # A threshold is only needed where a condition names it.
    without = text.replace("h2 = 2.5\n", "")
    assert "thresholds.h2 is not given" in refused(write(tmp_path, without))
    sampler = load_sampler(write(tmp_path, without.replace("h2", "2.75")))
    assert settings_of(sampler).high[BOXES.index("lehv"), 0] == 2.75


EXTENDS = 'extends = "quadrants"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base = ", "not valid TOML"),
        ("x = " + "[" * 5000, "not valid TOML"),
        (EXTENDS + "[base]\ntop_k = 0x" + "f" * 5000, "not valid TOML: Exceeds the limit"),
        (EXTENDS + "[expolre]\ntop_k_min = 3", "'expolre.top_k_min', did you mean 'explore.top_k"),
        (EXTENDS + "[base.top_k]\nx = 3", "no sampler key 'base.top_k.x'"),
        (EXTENDS + "description = 3", "'description' must be text"),
        ("extends = 3", "'extends' must be the name of a preset, not 3"),
        ('extends = "entropics"', "no sampler preset 'entropics'"),
        ('extends = "other.toml"', "other.toml: no such file"),
        ("", ' more are missing: extend a preset, extends = "quadrants"'),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    assert words in refused(write(tmp_path, text))


def test_unreadable_files(tmp_path: Path) -> None:
    assert "did you mean 'entropix'?" in refused("entropics")
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
    sampler = QUADRANTS.with_arm("cautious", cautious).with_values({"arms.mid": "cautious"})
    assert [mechanism.name for mechanism in sampler.mechanisms] == [*NAMES, "cautious"]
    assert calibrated(sampler, Path("nowhere")).mechanisms == sampler.mechanisms
    settings, plain = settings_of(sampler), params_of("quadrants")
    assert settings.arms.tolist() == [*plain.arms[:4], len(NAMES), plain.arms[5]]
    point = metrics_of(entropy=3.0)
    own = propose(settings.arms[4], point, settings, view())
    assert float(own.temperature) == pytest.approx(0.666 / 4)
    for arm in map(jnp.int32, range(len(ARMS))):  # the others are where they were
        one, other = (propose(arm, point, given, view()) for given in (plain, settings))
        assert jax.tree.leaves(one) == jax.tree.leaves(other)
    for name in ("argmax", "cautious"):
        with pytest.raises(UserError, match=f"'quadrants': there is a mechanism '{name}' already"):
            sampler.with_arm(name, cautious)
    # A sampler knows its own arms, and nobody else's.
    with pytest.raises(UserError, match=r"arms.mid = 'cautious': must be one of argmax.*forking$"):
        QUADRANTS.with_values({"arms.mid": "cautious"})
    with pytest.raises(TypeError):  # it cannot be changed behind its checks
        QUADRANTS.values["base.temperature"] = 50.0  # type: ignore[index]


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
    # A file may bear the name of a preset.
    path = write(tmp_path, EXTENDS + "[base]\ntop_k = 4", "entropix.toml")
    assert load_sampler(path).values["base.top_k"] == 4


# Any values, as a file and back and on a command line


# Text that TOML can hold: anything but lone surrogates.
texts = st.text(st.characters(codec="utf-8"), max_size=12)
short = st.text(st.characters(codec="utf-8"), max_size=8)  # at most 32 tokens of bytes


def scalar(field: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """A value within the range of a scalar parameter; its ends are frequent."""
    low, high, kind = field["low"], field["high"], field["type"]
    if kind is bool:
        return st.booleans()
    ends = st.sampled_from((low, high))
    if kind is int:
        return ends | st.integers(low, min(high, low + 300))
    return ends | st.floats(low, high) | st.integers(math.ceil(low), math.floor(high))


SCALARS = {key: scalar(field) for key, field in scalars().items()}
OTHERS: dict[str, st.SearchStrategy[Any]] = {
    **{f"arms.{regime}": st.sampled_from(sorted(ARMS)) for regime in REGIMES},
    "truncation.rule": st.sampled_from(RULES),
    "metrics.attn_entropy": st.sampled_from(("normalised", "raw")),
    "metrics.agreement": st.sampled_from(("corrected", "published")),
    "metrics.layers": st.sampled_from(("all", "last"))
    | st.lists(numbers(0, 1e6), min_size=1, max_size=4).filter(lambda all_: max(all_) > 1e-6),
    "metrics.noise_floor": st.booleans(),
    "thresholds.calibrated": st.booleans(),
    "inject.thought": texts | st.lists(texts, max_size=MAX_THOUGHTS),
    "dry.breakers": st.lists(st.sampled_from(("\n", "ab", "")), max_size=MAX_BREAKERS),
    "phrases.banned": st.lists(st.sampled_from(("\n", "abc", "")), max_size=MAX_PHRASES),
    **dict.fromkeys(("think_end.text", "budget_forcing.end", "budget_forcing.wait"), short),
    "draw.bans": st.lists(st.integers(0, 2**31 - 1), max_size=MAX_BANS),
    "draw.bias": st.lists(
        st.tuples(st.integers(0, 2**31 - 1), numbers(-100, 100)).map(list),
        max_size=MAX_BIASES,
        unique_by=lambda pair: pair[0],
    ),
}


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    """Valid values of some keys or of all of them."""
    some = draw(st.sets(st.sampled_from(sorted({**SCALARS, **OTHERS})), max_size=8))
    if draw(st.integers(0, 9)) == 0:
        some = {*SCALARS, *OTHERS}
    values = {key: draw({**SCALARS, **OTHERS}[key]) for key in sorted(some)}
    if draw(st.booleans()):
        boxes = draw(samplers()).values
        values |= {f"regimes.{box}": boxes[f"regimes.{box}"] for box in BOXES}
        values |= {f"thresholds.{name}": boxes[f"thresholds.{name}"] for name in THRESHOLDS}
    period, repeats = values.get("loop.max_period", 32), values.get("loop.repeats", 4)
    if period * repeats > LOOP_WINDOW:
        values |= {"loop.max_period": 32, "loop.repeats": 8}
    return values


def toml_of(value: Any) -> str:
    """A value as TOML, which writes all of these as JSON does, but for DEL and infinity."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def file_of(values: Mapping[str, Any], base: str | None, dotted: bool) -> str:
    """A sampler's file: keys with dots, or a table for each section."""
    lines = [] if base is None else [f"extends = {toml_of(base)}"]
    for key in sorted(values):
        section, name = key.split(".")
        if not dotted and f"[{section}]" not in lines:
            lines.append(f"[{section}]")
        lines.append(f"{key if dotted else name} = {toml_of(values[key])}")
    return "\n".join(lines)


def loaded(text: str) -> Sampler:
    with tempfile.TemporaryDirectory() as folder:
        return load_sampler(write(Path(folder), text))


def leaves_of(sampler: Sampler) -> list[Any]:
    layers = sampler.values["metrics.layers"]
    number = len(layers) if isinstance(layers, list) else NUM_LAYERS
    return jax.tree.leaves(settings_of(sampler, num_layers=number))


bases = st.sampled_from(preset_names())


@examples(80)
@given(settings(), bases, st.booleans(), st.booleans())
def test_values_survive_a_file(
    values: dict[str, Any], base: str, dotted: bool, whole: bool
) -> None:
    """Dumped and loaded they are the same, by themselves or beside those of a preset."""
    set_in_python = load_sampler(base).with_values(values)
    in_full = set_in_python.values, None, dotted  # a file that extends nothing
    sampler = loaded(file_of(*in_full) if whole else file_of(values, base, dotted))
    expected = dict(set_in_python.values)
    if not whole and "thresholds.h1" in values and "thresholds.calibrated" not in values:
        expected["thresholds.calibrated"] = False  # who sets thresholds means them
    assert dict(sampler.values) == expected
    assert {key: type(value) for key, value in sampler.values.items()} == {
        key: type(value) for key, value in expected.items()
    }
    for one, other in zip(leaves_of(sampler), leaves_of(set_in_python), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@examples(80)
@given(settings())
def test_values_survive_a_command_line(values: dict[str, Any]) -> None:
    given_values = dict(parse_setting(f"sampler.{key}={toml_of(v)}") for key, v in values.items())
    assert given_values == values


@examples(60)
@given(bases, st.tuples(*[numbers(0, 1e6)] * 4), texts)
def test_what_calibrate_writes_is_read(
    base: str, found: tuple[float, float, float, float], description: str
) -> None:
    h1, h2 = sorted(found[:2])
    u1, u2 = sorted(found[2:])
    thresholds = {"h1": h1, "h2": h2, "u1": u1, "u2": u2}
    changes: dict[str, Any] = {f"thresholds.{name}": value for name, value in thresholds.items()}
    text = preset_text(base, thresholds, description)
    try:
        expected = load_sampler(base).with_values({**changes, "thresholds.calibrated": False})
    except UserError:  # nothing lies between such bounds
        with pytest.raises(UserError, match="is above"):
            loaded(text)
        return
    sampler = loaded(text)
    assert sampler.description == description
    assert dict(sampler.values) == dict(expected.values)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1e3", -1000.0),
        ("argmax", "argmax"),
        (" Wait...", " Wait..."),
        ("", ""),
        ("5\nx = 3", "5\nx = 3"),
        ("1" * 5000, "1" * 5000),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_settings(text: str, value: Any) -> None:
    """What is no value of TOML is text."""
    assert repr(parse_setting(f"sampler.base.x={text}")) == repr(("base.x", value))


@pytest.mark.parametrize("text", ["base.top_k=3", "sampler.base.top_k", "", "=3"])
def test_settings_of_another_form(text: str) -> None:
    with pytest.raises(UserError, match=r"expected sampler\.KEY=VALUE"):
        parse_setting(text)


# A model's own thresholds


CALIBRATION = {"h1": 0.5, "h2": 3.5, "u1": 0.75, "u2": 4}


def with_calibration(folder: Path, content: Any = None) -> Path:
    text = calibration_text(CALIBRATION, "a text") if content is None else json.dumps(content)
    (folder / CALIBRATION_FILE).write_text(text)
    return folder


def test_calibrated_thresholds(tmp_path: Path) -> None:
    assert calibrated(QUADRANTS, tmp_path).notes != ()
    sampler = calibrated(QUADRANTS, with_calibration(tmp_path))
    assert sampler.notes == ()
    assert {name: sampler.values[f"thresholds.{name}"] for name in THRESHOLDS} == CALIBRATION
    params, inf = settings_of(sampler), np.inf
    assert params.high[:, :2].tolist() == [[0.5, 0.75], [inf, 0.75], [3.5, inf], [inf, inf]]
    assert params.low[:, :2].tolist() == [[-inf, -inf], [3.5, -inf], [-inf, 4], [3.5, 4]]
    assert json.loads((tmp_path / CALIBRATION_FILE).read_text())["source"] == "a text"


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {"thresholds": {"h1": 1}},
        {"thresholds": CALIBRATION | {"h1": "1"}},
        {"thresholds": CALIBRATION | {"h1": 9}},
        {"thresholds": CALIBRATION | {"u2": float("nan")}},
        {"thresholds": CALIBRATION | {"u2": 10**400}},
    ],
)
def test_damaged_calibrations(tmp_path: Path, content: Any) -> None:
    with pytest.raises(UserError) as caught:
        calibrated(QUADRANTS, with_calibration(tmp_path, content))
    assert str(tmp_path / CALIBRATION_FILE) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_user_changed_stands_above_the_calibration(tmp_path: Path) -> None:
    """Whether it was changed before or after, and even where it fits beside no published bound."""
    folder = with_calibration(tmp_path)
    before = calibrated(QUADRANTS.with_values({"thresholds.h1": 3.0}), folder)
    after = calibrated(QUADRANTS, folder).with_values({"thresholds.h1": 3.0})
    for sampler in (before, after, calibrated(after, folder)):
        assert sampler.values["thresholds.h1"] == 3.0
        assert sampler.values["thresholds.h2"] == 3.5
    with pytest.raises(UserError, match=r"thresholds.h1 = 4.0 is above thresholds.h2 = 3.5"):
        calibrated(QUADRANTS.with_values({"thresholds.h1": 4.0}), folder)


def test_who_asks_for_no_calibration_gets_none(tmp_path: Path) -> None:
    """A file with thresholds or bounds of its own, and a user who switches it off."""
    folder = with_calibration(tmp_path)
    off = QUADRANTS.with_values({"thresholds.calibrated": False})
    own = load_sampler(write(tmp_path, EXTENDS + "[thresholds]\nh1 = 0.2\n"))
    document = load_sampler("document-001")
    for sampler in (off, own, document):
        assert calibrated(sampler, folder) == sampler
    on = document.with_values({"thresholds.calibrated": True})
    assert calibrated(on, folder).values["thresholds.h2"] == 3.5

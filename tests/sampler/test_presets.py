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

from entropix_jax.errors import Note, UserError
from entropix_jax.host.resources import resource_folder
from entropix_jax.names import BOXES, LARGEST, REGIMES, THRESHOLDS
from entropix_jax.sampler.context import Context, Proposal, draw
from entropix_jax.sampler.mechanisms.dry import MAX_BREAKERS
from entropix_jax.sampler.mechanisms.inject import MAX_THOUGHT, MAX_THOUGHTS
from entropix_jax.sampler.mechanisms.phrases import MAX_PHRASES
from entropix_jax.sampler.presets import (
    choose_sampler,
    is_preset,
    load_sampler,
    parse_setting,
    preset_names,
)
from entropix_jax.sampler.regimes import classify
from entropix_jax.sampler.sampler import Sampler, scalars
from entropix_jax.sampler.settings import LOOP_WINDOW, MAX_BANS, MAX_BIASES
from entropix_jax.sampler.step import propose
from tests.support.properties import examples
from tests.support.sampler_strategies import numbers, samplers
from tests.support.samplers import (
    ARMS,
    CALIBRATION,
    EPSILON,
    HOST,
    LITERAL,
    NAMES,
    NUM_LAYERS,
    RULES,
    calibration_of,
    context,
    encode,
    metrics_of,
    params_of,
    settings_of,
    used_of,
)

QUADRANTS = load_sampler(LITERAL)
ENTROPIX = load_sampler("entropix")


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
    assert kinds <= {"bool", "int32", "uint8", "float32"}


PRINTED = {
    "lelv": ["entropy < 0.1", "varentropy < 0.1"],
    "helv": ["entropy > 3.0", "varentropy < 0.1"],
    "lehv": ["entropy < 5.0", "varentropy > 5.0"],
    "hehv": ["entropy > 5.0", "varentropy > 5.0"],
}
BOXED = {
    "lelv": ["entropy < h1", "varentropy < u1"],
    "helv": ["entropy > h2", "varentropy < u1"],
    "lehv": ["entropy < h2", "varentropy > u2"],
    "hehv": ["entropy > h2", "varentropy > u2"],
}
QUARTERS = {
    "lelv": ["entropy < h2", "varentropy < u2", "attn_entropy_norm < 50%", "agreement > 50%"],
    "helv": ["entropy > h2", "varentropy < u2"],
    "lehv": ["entropy < h2", "varentropy > u2"],
    "hehv": ["entropy > h2", "varentropy > u2", "agreement < 50%"],
}
OVERLAPPING = {**BOXED, "helv": ["entropy > h1", "varentropy < u2"]}
BAND = {
    "lelv": ["entropy < h1"],
    "helv": ["entropy > h2"],
    "lehv": ["entropy > h1", "entropy < h2"],
    "hehv": ["entropy > h2"],
}
# Where the documents draw, `entropix` branches and takes back.
DRAWING = ["argmax", "inject", "explore", "resample", "adaptive"]
BRANCHING = ["argmax", "inject", "branch", "backspace"]
WRITTEN = ["30%", "70%", "60%", "60%"]
# The numbers that documents 000 and 001 print besides T0, and those of the code that they quote.
PRINTED_NUMBERS = {
    "explore": [1.2, 0.3, 1.5, 0.5, 5],
    "resample": [2.0, 0.5, 2.0, 0.2, 0.5],
    "inject": [1.3, 0.2, 1.5],
    "adaptive": [12, LARGEST, 0.3, 0.2, 0.2, 0.1, 0.1, 0.3, 0.2, 1, 100, 0.5, 0.01, 0.5],
    "adaptive.confidence_": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
}
# Of the default, what differs from document 001.
DEFAULT: dict[str, Any] = {
    **{f"regimes.{box}": conditions for box, conditions in BOXED.items()},
    "arms.lehv": "branch",
    "arms.hehv": "backspace",
    "metrics.attn_entropy": "normalised",
    "metrics.agreement": "corrected",
    "metrics.units": "thresholds",
    "base.top_k": 0,
    "base.top_p": 1.0,
    "base.min_p": 0.086,
    "inject.thought": "",
    "inject.after": [".", "?", "!", "\n"],
    "inject.earliest": 20,
    "inject.per_row": 2,
    "inject.cooldown": 32,
    "resample.temperature_scale": 1.5,
    "resample.temperature_min": 1.0,
    "adaptive.most": 2.0,
    "dry.multiplier": 0.8,
    "loop.max_period": 32,
    "loop.repeats": 4,
    "loop.hottest": 1.5,
}


def test_the_bounds_and_arms_of_the_presets() -> None:
    for preset, boxes, arms, thresholds in (
        ("document-000", PRINTED, DRAWING, WRITTEN),
        ("document-001", PRINTED, DRAWING, WRITTEN),
        ("document-002", QUARTERS, ["argmax", "inject", "branch", "branch", "sample"], WRITTEN),
        ("document-003", PRINTED, DRAWING, WRITTEN),
        ("document-004", OVERLAPPING, [*BRANCHING, "sample"], ["30%", "70%", "40%", "60%"]),
        ("entropix", BOXED, [*BRANCHING, "adaptive"], WRITTEN),
        (
            "band",
            BAND,
            ["argmax", "argmax", "sample", "sample", "sample"],
            [2.0, 3.0, *WRITTEN[2:]],
        ),
        (LITERAL, BOXED, [*BRANCHING, "adaptive"], [0.3, 2.5, 1.2, 2.5]),
    ):
        values = load_sampler(preset).values
        assert {box: values[f"regimes.{box}"] for box in BOXES} == boxes
        assert [values[f"arms.{regime}"] for regime in REGIMES] == arms
        assert [values[f"thresholds.{name}"] for name in THRESHOLDS] == thresholds
        assert values["thresholds.dynamic"] is False


def test_entropix_corrects_what_the_documents_print() -> None:
    values, document = ENTROPIX.values, load_sampler("document-001").values
    assert {key: values[key] for key in values if values[key] != document[key]} == DEFAULT
    assert (document["metrics.attn_entropy"], document["metrics.agreement"]) == ("raw", "published")
    thinks = ("thought", "after", "earliest", "per_row", "cooldown")
    assert [document[f"inject.{key}"] for key in thinks] == [" ...", "", 0, 1_000_000, 1]
    base = [document[f"base.{key}"] for key in ("temperature", "top_p", "top_k", "min_p")]
    assert base == [0.666, 0.90, 27, 0.03]
    for start, printed in PRINTED_NUMBERS.items():
        own = [document[key] for key in scalars() if key.startswith(start)]
        assert own[-3:] == printed if start == "inject" else own[: len(printed)] == printed
    # Branches of two, of four tokens; one retraction of a token below a tenth at a position.
    branch = {key: values[f"branch.{key}"] for key in ("width", "depth", "min_p", "top_p")}
    assert branch == {"width": 2, "depth": 4, "min_p": 0.5, "top_p": 0.95}
    back = {key: values[f"backspace.{key}"] for key in ("reach", "max_prob", "per_position")}
    assert back == {"reach": 1, "max_prob": 0.1, "per_position": 1}
    # Nothing else acts on the logits.
    assert used_of(ENTROPIX) == {"dry", "inject"}


def test_the_other_documents() -> None:
    document = load_sampler("document-001").values
    assert document == load_sampler("document-003").values
    zero = load_sampler("document-000").values  # with five candidates
    assert {key: zero[key] for key in zero if document[key] != zero[key]} == {"adaptive.draws": 5}
    two, four = (load_sampler(f"document-00{i}").values for i in (2, 4))
    thinks = [two[f"inject.{key}"] for key in ("thought", "cooldown", "until_confident", "after")]
    assert thinks == [" Wait..", 64, True, ""]
    seen = [two[f"metrics.{key}"] for key in ("attn_entropy", "agreement", "units")]
    assert seen == ["normalised", "corrected", "bits"]
    assert [two[f"branch.{key}"] for key in ("width", "depth", "noise")] == [4, 8, 0.0]
    thinks = [four[f"inject.{key}"] for key in ("thought", "cooldown", "until_confident", "after")]
    assert thinks == [" Wait...", 8, False, ""]
    assert [four[f"branch.{key}"] for key in ("width", "depth", "noise")] == [4, 8, 1.0]
    back = ("reach", "max_prob", "per_position")
    assert [four[f"backspace.{key}"] for key in back] == [1, 1.0, 2]
    for values in (two, four):
        assert values["metrics.noise_floor"] is (values is four)
        base = [values[f"base.{key}"] for key in ("temperature", "top_p", "top_k", "min_p")]
        assert base == [0.666, 0.90, 27, 0.03]
        assert values["dry.multiplier"] == values["loop.max_period"] == 0


def test_the_band_is_the_default_of_version_0_1() -> None:
    """Entropy alone: the argmax outside 2 to 3 bits, min-p at temperature 1 within."""
    params, values = params_of("band"), load_sampler("band").values
    for entropy, drawn in (
        (0.0, 0),
        (1.99, 0),
        (2.01, 1),
        (2.5, 1),
        (2.99, 1),
        (3.01, 0),
        (9.0, 0),
    ):
        for varentropy in (0.0, 1.0, 30.0):
            point = metrics_of(entropy=entropy, varentropy=varentropy)
            own = propose(params.arms[classify(point, params)], context(point, params))
            assert float(own.temperature) == drawn, (entropy, varentropy)
            if drawn:
                cut = float(own.min_p), float(own.top_p), int(own.top_k), int(own.draws)
                assert cut == (float(np.float32(0.086)), 1.0, 0, 1)
    assert (values["dry.multiplier"], values["loop.repeats"], values["arms.loop"]) == (
        *(0.8, 4),
        "resample",
    )
    assert used_of(load_sampler("band")) == {"dry", "inject"}
    assert not load_sampler("band").follows_tables


def test_the_old_name_of_the_default(tmp_path: Path) -> None:
    with pytest.warns(Note, match="the preset 'quadrants' is called 'entropix' now"):
        old = load_sampler("quadrants")
    assert (old.name, old.description) == ("entropix", ENTROPIX.description)
    assert old.values == ENTROPIX.values
    with pytest.warns(Note, match="is called 'entropix' now"):
        own = load_sampler(write(tmp_path, 'extends = "quadrants"\n[base]\ntop_k = 3\n'))
    assert own.values == {**ENTROPIX.values, "base.top_k": 3}
    assert is_preset("quadrants")
    assert not is_preset("quadrant")
    assert "quadrants" not in preset_names()


# Where each value ends up


def test_values_reach_their_places() -> None:
    """Those that no arm or rule shows in its own tests."""
    changes = {
        "regimes.lelv": ["entropy < h1", "agreement > 0.25", "entropy < 10%"],
        "regimes.helv": ["varentropy > u1", "varentropy > 1", "varentropy < 5e0", "varentropy < 7"],
        "regimes.lehv": ["agreement > 50%", "agreement > 25%", "attn_entropy_norm < 75%"],
        "regimes.hehv": ["entropy > h1", "entropy > h2", "sequence_varentropy < u2"],
        "arms.lelv": "sample",
        "arms.mid": "explore",
        "arms.loop": "argmax",
        "metrics.attn_entropy": "raw",
        "metrics.agreement": "published",
        "metrics.units": "thresholds",
        "metrics.layers": [0, 2.5],
        "metrics.noise_floor": True,
        "truncation.rule": "eta",
        "draw.bans": [4, 0],
        "draw.bias": [[7, 100], [0, -0.1]],
        "thresholds.h1": 0.5,
        "thresholds.u2": "80%",
        "thresholds.dynamic": True,
        "thresholds.rate": 0.25,
    }
    params, plain = params_of(LITERAL, changes), params_of(LITERAL)
    inf = np.inf
    assert params.low.tolist() == [
        [-inf, -inf, -inf, 0.25, -inf],
        [-inf, 1, -inf, -inf, -inf],
        [-inf, -inf, -inf, np.float32(0.65), -inf],
        [-inf] * 5,
    ]
    assert params.high.tolist() == [
        [np.float32(0.1), inf, inf, inf, inf],  # 30% is 0.3
        [inf, 5, inf, inf, inf],
        [inf, inf, np.float32(0.72), inf, inf],
        [inf] * 5,
    ]
    none = [-1] * 5
    lows, highs = [none, [-1, 2, -1, -1, -1], none, [1, -1, -1, -1, -1]], [none] * 4
    highs = [[0, -1, -1, -1, -1], none, none, [-1, -1, -1, -1, 3]]
    assert params.low_thresholds.tolist() == lows
    assert params.high_thresholds.tolist() == highs
    thresholds = params.thresholds
    np.testing.assert_allclose(thresholds.values, [0.5, 2.5, 1.2, 13.75])  # 60% is 2.5, 100% 25
    # The ranks of the numbers, and what is written.
    np.testing.assert_allclose(thresholds.quantiles, [0.3 + 0.4 * 0.2 / 2.2, 0.7, 0.4, 0.8])
    assert (bool(thresholds.dynamic), float(thresholds.rate)) == (True, 0.25)
    names = ["sample", "inject", "branch", "backspace", "explore", "argmax"]
    assert [ARMS[i] for i in params.arms] == names
    assert params.layer_weights.tolist() == [0, 2.5]
    assert params_of(LITERAL, {"metrics.layers": "last"}).layer_weights.tolist() == [0, 1]
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
        assert settings.in_thresholds == settings.thresholds.dynamic == published


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
    params = params_of(LITERAL, changes, encode=lambda text: encode(text.replace("x", "")))
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
    ("thresholds.h1", True, "must be a number in"),
    ("thresholds.h1", "h2", 'or a percentile from "0%" to "100%"'),
    ("thresholds.h1", "30", "or a percentile from"),
    ("thresholds.h1", "%", "or a percentile from"),
    ("thresholds.h1", "1e1%", "or a percentile from"),
    ("thresholds.h1", "nan%", "or a percentile from"),
    ("thresholds.h1", "101%", "or a percentile from"),
    ("thresholds.u2", "-1%", "or a percentile from"),
    ("thresholds.h1", 2.6, r"thresholds.h1 = 2.6 is above thresholds.h2 = 2.5"),
    ("thresholds.h2", 10**400, "must be a number in"),
    ("regimes.lelv", "entropy < 1", "must be a list of conditions"),
    ("regimes.lelv", ["entropy <= 1"], "expected QUANTITY < NUMBER or QUANTITY > NUMBER"),
    ("regimes.lelv", ["entropi < 1"], "no quantity 'entropi', did you mean 'entropy'"),
    (
        "regimes.lelv",
        ["entropy < h3"],
        r"'h3' is not a number up to 1e\+06, a percentile",
    ),
    ("regimes.lelv", ["entropy < nan"], "'nan' is not a number .* or one of h1, h2, u1, u2"),
    ("regimes.lelv", ["entropy < 101%"], 'a percentile must be from "0%" to "100%"'),
    ("regimes.lelv", ["entropy < -0.5%"], 'a percentile must be from "0%" to "100%"'),
    ("regimes.lelv", ["agreement > half%"], "a percentile must be"),
    ("regimes.lelv", ["sequence_varentropy < 40%"], "sequence_varentropy has no percentiles"),
    ("inject.after", 5, r'must be a list of single characters, such as \[".", "\?"\]'),
    ("inject.after", "..", "list of single characters"),
    ("inject.after", [".", "?!"], "list of single characters"),
    ("metrics.units", "nats", "must be one of bits, thresholds"),
    ("regimes.lelv", ["entropy > 1", "entropy < 1"], "no entropy is above 1 and below 1"),
    ("regimes.hehv", ["varentropy > u2", "varentropy < u1"], "no varentropy is above 2.5"),
]


@pytest.mark.parametrize(("key", "value", "words"), PROBLEMS)
def test_wrong_values(key: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        QUADRANTS.with_values({key: value})
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_of_older_files(tmp_path: Path) -> None:
    message = refused(write(tmp_path, EXTENDS + "[thresholds]\ncalibrated = true\n"))
    assert "'thresholds.calibrated' is no longer a sampler key: thresholds are perc" in message


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
        params_of(LITERAL, {"metrics.layers": [1, 1, 1]})
    longest = params_of(LITERAL, {"inject.thought": "x" * 64}).own["inject"].thought
    assert (longest[0] == ord("x")).all()
    for thought in ("x" * 65, ["a", "x" * 65, "x" * 66]):  # the first one that is too long
        with pytest.raises(UserError, match=r"inject\.thought is 65 tokens long, at most 64"):
            params_of(LITERAL, {"inject.thought": thought})


NEWER: dict[str, Any] = {  # keys that older files do not have, and their values there
    "draw.bias": [],
    "thresholds.dynamic": False,
    "thresholds.rate": 0.02,
    "metrics.units": "bits",
    "adaptive.most": LARGEST,
    "inject.after": "",
    "inject.earliest": 0,
    "loop.hottest": LARGEST,
}


def test_missing_keys(tmp_path: Path) -> None:
    file = resource_folder("configs") / "entropix.toml"
    text = re.sub(r" *#.*", "", file.read_text(encoding="utf-8"))
    for line in ("top_k = 0\n", 'mid = "adaptive"\n', "bans = []\n"):
        assert line in text
        message = refused(write(tmp_path, text.replace(line, "")))
        assert f"{line.split(' =')[0]}' is missing: extend a preset" in message
    older = text
    for section, _, name in (key.partition(".") for key in NEWER):
        start = older.index(f"[{section}]\n")
        rest, number = re.subn(rf"(?m)^{name} = .*\n", "", older[start:], count=1)
        older = older[:start] + rest
        assert number == 1
    sampler = load_sampler(write(tmp_path, older))
    assert sampler.values == {**ENTROPIX.values, **NEWER}
    assert sampler.with_values({"draw.bias": [[3, 1]]}).values["draw.bias"] == [[3, 1]]
    # A threshold is only needed where a condition names it.
    without = text.replace('h2 = "70%"\n', "")
    assert "thresholds.h2 is not given" in refused(write(tmp_path, without))
    sampler = load_sampler(write(tmp_path, without.replace("h2", "2.75")))
    assert settings_of(sampler).high[BOXES.index("lehv"), 0] == 2.75


EXTENDS = 'extends = "entropix"\n'


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
        ("", ' more are missing: extend a preset, extends = "entropix"'),
        (
            EXTENDS + '[thresholds]\nh1 = "101%"',
            "thresholds.h1 = '101%': must be a number in [0, 1",
        ),
        (EXTENDS + '[thresholds]\nh1 = "70.5%"', "h1 = 70.5% is above thresholds.h2 = 70%"),
        (
            EXTENDS + '[regimes]\nlelv = ["entropy < 101%"]',
            "'entropy < 101%': a percentile must be",
        ),
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


def cautious(ctx: Context) -> Proposal:
    """One draw, cooler the more there is to choose from."""
    temperature = ctx.settings.base.temperature / (1.0 + ctx.metrics.entropy)
    return draw("sample", ctx, temperature=temperature)


def test_an_arm_of_ones_own() -> None:
    """It stands beside the others, under its name, through all that makes a sampler."""
    sampler = QUADRANTS.with_arm("cautious", cautious).with_values({"arms.mid": "cautious"})
    assert [mechanism.name for mechanism in sampler.mechanisms] == [*NAMES, "cautious"]
    assert sampler.resolve(CALIBRATION).mechanisms == sampler.mechanisms
    settings, plain = settings_of(sampler), params_of(LITERAL)
    assert settings.arms.tolist() == [*plain.arms[:4], len(NAMES), plain.arms[5]]
    point = metrics_of(entropy=3.0)
    own = propose(settings.arms[4], context(point, settings))
    assert float(own.temperature) == pytest.approx(0.666 / 4)
    for arm in map(jnp.int32, range(len(ARMS))):  # the others are where they were
        one, other = (propose(arm, context(point, given)) for given in (plain, settings))
        assert jax.tree.leaves(one) == jax.tree.leaves(other)
    for name in ("argmax", "cautious"):
        with pytest.raises(UserError, match=f"'literal': there is a mechanism '{name}' already"):
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
    "metrics.units": st.sampled_from(("bits", "thresholds")),
    "inject.after": st.sampled_from(("", ".", [".", "\n"], ["", "?"])),
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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1e3", -1000.0),
        ("argmax", "argmax"),
        ("30%", "30%"),
        ('"30%"', "30%"),
        ('["entropy < 30%"]', ["entropy < 30%"]),
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


# Percentiles, and a model's tables


OTHER = calibration_of({0: 0, 30: 0.1, 70: 1.0, 100: 5}, {0: 0, 50: 4, 100: 8})  # of another model


def test_percentiles_become_numbers() -> None:
    """For each model its own; what was written stays known."""
    for calibration, h1, h2, u in ((CALIBRATION, 0.3, 2.5, 2.5), (OTHER, 0.1, 1.0, 4.8)):
        sampler = ENTROPIX.resolve(calibration, "tables.json")
        thresholds = {"thresholds.h1": h1, "thresholds.h2": h2, "thresholds.u1": u}
        thresholds["thresholds.u2"] = u
        assert sampler.values == {**ENTROPIX.values, **thresholds}
        assert sampler.written == ENTROPIX.written == ENTROPIX.values
        assert [*sampler.percentiles] == [*thresholds]
        assert (sampler.calibration, ENTROPIX.calibration) == (calibration, None)
        settings = settings_of(sampler)
        np.testing.assert_allclose(settings.thresholds.values, [h1, h2, u, u])
        np.testing.assert_allclose(settings.thresholds.quantiles, [0.3, 0.7, 0.6, 0.6])
    document = load_sampler("document-002").resolve(CALIBRATION)
    assert document.values["regimes.lelv"][2:] == ["attn_entropy_norm < 0.44", "agreement > 0.65"]
    assert document.values["regimes.hehv"][2:] == ["agreement < 0.65"]
    assert {*document.percentiles} >= {"regimes.lelv", "regimes.hehv", "thresholds.h1"}
    with pytest.raises(
        ValueError, match="the percentiles of <Sampler 'entropix'> are not resolved"
    ):
        ENTROPIX.settings(**HOST)


def test_a_change_of_the_user_stands_beside_percentiles() -> None:
    """Whether it came before or after the model's tables; a threshold may also be fixed."""
    for value, number in (("40%", 0.85), (1.5, 1.5), ("30.5%", 0.3275), ("100%", 10.0), ("0%", 0)):
        change = {"thresholds.h2": value, "thresholds.h1": 0}
        before = ENTROPIX.with_values(change).resolve(CALIBRATION)
        after = ENTROPIX.resolve(CALIBRATION).with_values(change)
        for sampler in (before, after, after.resolve(CALIBRATION)):
            assert sampler.values["thresholds.h2"] == number
            assert sampler.written["thresholds.h2"] == value
            assert sampler.values["thresholds.u1"] == 2.5
    assert before.resolve(OTHER).values["thresholds.u2"] == 4.8


# Bounds that only the model's tables show to be wrong.
CROSSING: list[tuple[dict[str, Any], str]] = [
    ({"thresholds.h1": 2.6}, "thresholds.h1 = 2.6 is above thresholds.h2 = 2.5"),
    ({"thresholds.h2": 0.2}, "thresholds.h1 = 0.3 is above thresholds.h2 = 0.2"),
    ({"thresholds.u1": 3.0}, "thresholds.u1 = 3.0 is above thresholds.u2 = 2.5"),
    (
        {"regimes.lelv": ["agreement > 50%", "agreement < 0.6"]},
        "regimes.lelv: 'agreement < 0.6': no agreement is above 0.65 and below 0.6",
    ),
    (
        {"regimes.lelv": ["entropy > h1", "entropy < 10%"]},
        "regimes.lelv: 'entropy < 0.1': no entropy is above 0.3 and below 0.1",
    ),
]


@pytest.mark.parametrize(("changes", "words"), CROSSING)
def test_percentiles_that_cross(changes: dict[str, Any], words: str) -> None:
    """The message says which tables made it so; it is the same once they are known."""
    sampler = ENTROPIX.with_values(changes)
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        sampler.resolve(CALIBRATION, "of/calibration.json")
    assert str(caught.value).startswith("entropix with of/calibration.json: ")
    with pytest.raises(UserError, match=re.escape(words)):
        ENTROPIX.resolve(CALIBRATION).with_values(changes)


def test_what_follows_a_models_tables() -> None:
    """Only there a model without tables is worth a note: not where one arm serves all regimes."""
    follows = {name for name in preset_names() if load_sampler(name).follows_tables}
    assert follows == {"entropix", "document-002", "document-004"}
    for changes, expected in (
        ({"thresholds.h1": 1, "thresholds.h2": 2, "thresholds.u1": 1, "thresholds.u2": 2}, False),
        ({"thresholds.h1": 0, "thresholds.h2": 2, "thresholds.u1": 1}, True),
    ):
        assert ENTROPIX.with_values(changes).follows_tables is expected
    assert load_sampler("band").with_values({"thresholds.h2": "80%"}).follows_tables
    assert load_sampler("band").with_values({"regimes.hehv": ["agreement < 10%"]}).follows_tables
    own = load_sampler("document-001")
    assert own.with_values({"metrics.units": "thresholds"}).follows_tables
    assert not load_sampler("min-p").with_values({"thresholds.h1": "1%"}).follows_tables
    # Both use h2 and u2: backspace falls back to adaptive.
    for arm in ("adaptive", "backspace"):
        alike = {f"arms.{regime}": arm for regime in REGIMES}
        assert ENTROPIX.with_values({**alike, "arms.loop": "argmax"}).follows_tables
        alike = {f"arms.{regime}": "argmax" for regime in REGIMES}
        assert ENTROPIX.with_values({**alike, "arms.loop": arm}).follows_tables
    assert not ENTROPIX.with_values(alike | {"arms.loop": "argmax"}).follows_tables


def test_percentiles_on_a_command_line() -> None:
    sampler = choose_sampler(
        "entropix",
        [
            *(
                "sampler.thresholds.h1=40%",
                'sampler.thresholds.h2="75%"',
                "sampler.thresholds.u1=1",
            ),
            'sampler.regimes.mid_=["entropy < 5%"]'.replace("mid_", "lelv"),
        ],
    ).resolve(CALIBRATION)
    assert sampler.values["thresholds.h1"] == 0.85
    assert sampler.values["thresholds.h2"] == 3.75
    assert sampler.values["thresholds.u1"] == 1
    assert sampler.values["regimes.lelv"] == ["entropy < 0.05"]


def test_the_documented_defaults() -> None:
    """Every key of the default is in docs/settings.md, with its value."""
    found: dict[str, Any] = {}
    section = ""
    for line in (
        (Path(__file__).parents[2] / "docs" / "settings.md")
        .read_text(encoding="utf-8")
        .splitlines()
    ):
        section = line.removeprefix("## ") if line.startswith("## ") else section
        row = re.match(r"\| `([\w.]+)` \| (?:`(.*?)`|([^ |:]+))", line)
        if row:
            key = row[1] if "." in row[1] else f"{section}.{row[1]}"
            value = row[2] or row[3].replace(",", "").replace("−", "-")
            found[key] = json.loads(value)
    assert found == dict(load_sampler("entropix").values)

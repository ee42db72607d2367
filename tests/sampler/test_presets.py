"""Sampler files, their error messages, and a model's quantile tables."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import generic_calibration as script
import jax
import numpy as np
import pytest

from entropix_jax.errors import Note, UserError
from entropix_jax.host.resources import resource_folder
from entropix_jax.names import BOXES, LARGEST, REGIMES
from entropix_jax.sampler.calibration import (
    TABLES,
    Calibration,
    generic_calibration,
    read_calibration,
)
from entropix_jax.sampler.files import is_preset, parse_setting, preset_names
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import MAX_BANS, MAX_BIASES
from tests.support.samplers import (
    CALIBRATION,
    HOST,
    LITERAL,
    RULES,
    calibration_of,
    params_of,
    scalars,
    settings_of,
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


# Shipped files


@pytest.mark.parametrize("name", preset_names())
def test_presets_load(name: str) -> None:
    sampler = load_sampler(name)
    assert sampler.name == name
    assert sampler.description
    params = params_of(name)
    assert params.layer_weights.tolist() == [1.0, 1.0]  # every preset uses all layers
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
    assert kinds <= {"bool", "int32", "uint8", "float32"}


def test_values_of_the_presets() -> None:
    """The presets differ from `entropix` in the values of a file. Those of the documents are the
    documents' own, or those of the code that they quote."""
    own = {
        name: {k: v for k, v in load_sampler(name).values.items() if ENTROPIX.values.get(k) != v}
        for name in preset_names()
    }
    assert own == json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))


def test_the_old_name_of_the_default() -> None:
    with pytest.warns(Note, match="the preset 'quadrants' is called 'entropix' now"):
        old = load_sampler("quadrants")
    assert (old.name, old.description) == ("entropix", ENTROPIX.description)
    assert old.values == ENTROPIX.values
    assert is_preset("quadrants")
    assert not is_preset("quadrant")
    assert "quadrants" not in preset_names()


# Errors

PROBLEMS: list[tuple[str, Any, str]] = [
    ("base.temprature", 1.0, r"did you mean 'base\.temperature'"),
    ("base.temperature", "hot", "must be a number"),
    ("base.top_k", True, "must be an integer"),
    ("truncation.rule", "nucelus", f"must be one of {', '.join(RULES)}"),
    ("loop.repeats", 17, "at most 256"),  # times 16
    ("arms.mid", "branc", "must be one of argmax, "),
    ("metrics.layers", "first", 'must be "all", "last" or a list of weights'),
    ("draw.bans", [*range(MAX_BANS + 1)], f"at most {MAX_BANS} token ids"),
    ("draw.bias", [[i, 1] for i in range(MAX_BIASES + 1)], f"at most {MAX_BIASES} pairs"),
    ("draw.bias", [[5, 100.1]], r"pairs \[token id, bias in \[-100, 100\]\]"),
    ("draw.bias", [[5, float("nan")]], r"bias in \[-100, 100\]"),
    ("draw.bias", [[5, 1], [6, 1], [5, 2]], "each token once"),
    ("thresholds.h1", -1, "must be a number in"),
    ("thresholds.h1", "h2", 'or a percentile from "0%" to "100%"'),
    ("thresholds.h1", "101%", "or a percentile from"),
    ("thresholds.h1", 2.6, r"thresholds.h1 = 2.6 is above thresholds.h2 = 2.5"),
    ("regimes.lelv", ["entropy <= 1"], "expected QUANTITY < NUMBER or QUANTITY > NUMBER"),
    ("regimes.lelv", ["entropi < 1"], "no quantity 'entropi', did you mean 'entropy'"),
    ("regimes.lelv", ["entropy < h3"], r"'h3' is not a number up to 1e\+06, a percentile"),
    ("regimes.lelv", ["entropy < nan"], "'nan' is not a number .* or one of h1, h2, u1, u2"),
    ("regimes.lelv", ["entropy < 101%"], 'a percentile must be from "0%" to "100%"'),
    ("regimes.lelv", ["sequence_varentropy < 40%"], "sequence_varentropy has no percentiles"),
    ("inject.after", 5, r'must be a list of single characters, such as \[".", "\?"\]'),
    ("regimes.lelv", ["entropy > 1", "entropy < 1"], "no entropy is above 1 and below 1"),
    ("regimes.hehv", ["varentropy > u2", "varentropy < u1"], "no varentropy is above 2.5"),
]


@pytest.mark.parametrize(("key", "value", "words"), PROBLEMS)
def test_wrong_values(key: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        QUADRANTS.with_values({key: value})
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", scalars())
def test_range_ends_are_inclusive(key: str) -> None:
    """Both ends are valid, and values beyond them are not. Integer keys reject fractions."""
    low, high, kind = (getattr(scalars()[key], name) for name in ("low", "high", "kind"))
    # The guard looks 256 tokens back, so that 256 repeats need a period of 1.
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


def test_layers_and_thoughts_are_checked_against_the_model() -> None:
    with pytest.raises(UserError, match="has 3 weights, the model has 2 layers"):
        params_of(LITERAL, {"metrics.layers": [1, 1, 1]})
    longest = params_of(LITERAL, {"inject.thought": "x" * 64}).own["inject"].thought
    assert (longest[0] == ord("x")).all()
    for thought in ("x" * 65, ["a", "x" * 65, "x" * 66]):  # the first one that is too long
        with pytest.raises(UserError, match=r"inject\.thought is 65 tokens long, at most 64"):
            params_of(LITERAL, {"inject.thought": thought})


NEWER: dict[str, Any] = {  # keys that may be missing in older files, and their defaults
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
    # A threshold is required only if a condition uses it.
    without = text.replace('h2 = "70%"\n', "")
    assert "thresholds.h2 is not given" in refused(write(tmp_path, without))
    sampler = load_sampler(write(tmp_path, without.replace("h2", "2.75")))
    assert 2.75 in settings_of(sampler).conditions.bound[BOXES.index("lehv")]


EXTENDS = 'extends = "entropix"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base = ", "not valid TOML"),
        (EXTENDS + "[base]\ntop_k = 0x" + "f" * 5000, "not valid TOML: Exceeds the limit"),
        (EXTENDS + "[expolre]\ntop_k_min = 3", "'expolre.top_k_min', did you mean 'explore.top_k"),
        (EXTENDS + "[base.top_k]\nx = 3", "no sampler key 'base.top_k.x'"),
        (EXTENDS + "description = 3", "'description' must be text"),
        (EXTENDS + "[thresholds]\ncalibrated = true", "'thresholds.calibrated' is no longer a"),
        ("extends = 3", "'extends' must be the name of a preset, not 3"),
        ('extends = "entropics"', "no sampler preset 'entropics'"),
        ('extends = "other.toml"', "other.toml: no such file"),
        ("", ' more are missing: extend a preset, extends = "entropix"'),
        (EXTENDS + '[thresholds]\nh1 = "70.5%"', "h1 = 70.5% is above thresholds.h2 = 70%"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    assert words in refused(write(tmp_path, text))


def test_unreadable_files(tmp_path: Path) -> None:
    assert "did you mean 'entropix'?" in refused("entropics")
    (tmp_path / "folder.toml").mkdir()
    assert "not a regular file" in refused(str(tmp_path / "folder.toml"))
    (tmp_path / "latin.toml").write_bytes(b'description = "\xe9"')
    assert "not UTF-8" in refused(str(tmp_path / "latin.toml"))


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
    # A file may have the name of a preset.
    path = write(tmp_path, EXTENDS + "[base]\ntop_k = 4", "entropix.toml")
    assert load_sampler(path).values["base.top_k"] == 4


# Values as a file and back, and on a command line


@pytest.mark.parametrize("name", preset_names())
def test_values_survive_a_file_and_a_command_line(tmp_path: Path, name: str) -> None:
    values = dict(load_sampler(name).values)
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    assert dict(load_sampler(write(tmp_path, "\n".join(lines))).values) == values
    set_ = [f"sampler.{key}={json.dumps(value)}" for key, value in values.items()]
    assert dict(map(parse_setting, set_)) == values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1e3", -1000.0),
        ("30%", "30%"),
        ('"30%"', "30%"),
        ('["entropy < 30%"]', ["entropy < 30%"]),
        ("", ""),
        ("5\nx = 3", "5\nx = 3"),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_parse_setting(text: str, value: Any) -> None:
    """Values that are not valid TOML are read as text."""
    assert repr(parse_setting(f"sampler.base.x={text}")) == repr(("base.x", value))


# Percentiles, and a model's tables


OTHER = calibration_of({0: 0, 30: 0.1, 70: 1.0, 100: 5}, {0: 0, 50: 4, 100: 8})  # of another model


def test_percentiles_become_numbers() -> None:
    """Each model gets its own values. `written` keeps the percentiles."""
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


def test_changes_combine_with_percentiles() -> None:
    """The change may come before or after the model's tables, and may be a fixed threshold."""
    for value, number in (("40%", 0.85), (1.5, 1.5), ("30.5%", 0.3275), ("100%", 10.0), ("0%", 0)):
        change = {"thresholds.h2": value, "thresholds.h1": 0}
        before = ENTROPIX.with_values(change).resolve(CALIBRATION)
        after = ENTROPIX.resolve(CALIBRATION).with_values(change)
        for sampler in (before, after, after.resolve(CALIBRATION)):
            assert sampler.values["thresholds.h2"] == number
            assert sampler.written["thresholds.h2"] == value
            assert sampler.values["thresholds.u1"] == 2.5
    assert before.resolve(OTHER).values["thresholds.u2"] == 4.8


# Bounds that are invalid only with the model's tables.
CROSSING: list[tuple[dict[str, Any], str]] = [
    ({"thresholds.h1": 2.6}, "thresholds.h1 = 2.6 is above thresholds.h2 = 2.5"),
    ({"regimes.lelv": ["agreement > 50%", "agreement < 0.6"]}, "no agreement is above 0.65 and"),
    ({"regimes.lelv": ["entropy > h1", "entropy < 10%"]}, "no entropy is above 0.3 and below"),
]


@pytest.mark.parametrize(("changes", "words"), CROSSING)
def test_percentiles_that_cross(changes: dict[str, Any], words: str) -> None:
    """The message names the tables. A later change gives the same message."""
    sampler = ENTROPIX.with_values(changes)
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        sampler.resolve(CALIBRATION, "of/calibration.json")
    assert str(caught.value).startswith("entropix with of/calibration.json: ")
    with pytest.raises(UserError, match=re.escape(words)):
        ENTROPIX.resolve(CALIBRATION).with_values(changes)


def test_follows_tables() -> None:
    """Only these samplers need a note if the model has no tables. Samplers with one arm do not."""
    follows = {name for name in preset_names() if load_sampler(name).follows_tables}
    assert follows == {"clarify", "entropix", "document-002", "document-004", "lookup"}
    numbers = {"thresholds.h1": 1, "thresholds.h2": 2, "thresholds.u1": 1, "thresholds.u2": 2}
    assert not ENTROPIX.with_values(numbers).follows_tables
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


def test_the_documented_defaults_and_ranges() -> None:
    """docs/settings.md contains every key of the default, with its value, and each range."""
    file = Path(__file__).parents[2] / "docs" / "settings.md"
    text, most = file.read_text(encoding="utf-8").replace("\u2212", "-"), 2**31 - 1
    named = {"coef.": "-100 to 100", "count": f"0 to {most}", "1 or more": f"1 to {most}"}
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| (.*?) ?\|", text, re.MULTILINE)
    values = {
        key: json.loads(value.strip("`") if "`" in value else value.replace(",", ""))
        for key, value, _ in rows
    }
    assert values == dict(ENTROPIX.values)
    numbers = {key: number for key, number in scalars().items() if number.kind is not bool}
    found = {
        key: [float(end.replace(",", "")) for end in named.get(range_, range_).split(" to ")]
        for key, _, range_ in rows
        if key in numbers
    }
    assert found == {key: [number.low, number.high] for key, number in numbers.items()}


# Quantile tables: percentiles, ranks, their file, and the shipped tables

MODEL = {"layers": 4, "width": 192, "heads": 6}
RENEW = "entropix-jax calibrate --model some/model"


def measured(count: int = 1234) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    names = (*TABLES, "max_prob")
    return {name: rng.gamma(0.7, 2.0, count).astype(np.float32) for name in names}


def calibration() -> Calibration:
    return Calibration.from_values(measured(), "some text", MODEL)


def content() -> dict[str, Any]:
    own: dict[str, Any] = calibration().to_json()
    return own


def test_a_calibration_file_contains_the_tables(tmp_path: Path) -> None:
    """Values are NumPy's percentiles, interpolated linearly. `rank` is the inverse of `value`."""
    own, values = calibration(), measured()
    for name in TABLES:
        for percent in (0, 1, 12.5, 30, 59.9, 99.5, 100):
            value = own.value(name, percent)
            around = np.percentile(
                values[name].astype(np.float64), [int(percent), -(-percent // 1)]
            )
            expected = np.interp(percent % 1, [0, 1], around)
            assert value == pytest.approx(expected, rel=1e-4)
            assert own.rank(name, value) == pytest.approx(percent, abs=0.05)
        assert (own.rank(name, -1.0), own.rank(name, 1e5)) == (0, 100)
    text = own.to_text()
    assert json.loads(text) == own.to_json()
    assert len(text.splitlines()) < 40  # a table a line
    path = tmp_path / "calibration.json"
    path.write_text(text)
    read = read_calibration(path)
    assert (read.source, read.tokens, read.model) == ("some text", 1234, MODEL)
    assert not read.generic
    assert read.to_text() == text


TABLE = content()["quantiles"]["entropy"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": 1}, "calibration format 1 is not supported (expected 2)"),
        ({"format": None, "thresholds": {"h1": 0.3}}, "calibration format 1 is not supported"),
        ({"quantiles": {"entropy": TABLE}}, "'quantiles' must hold entropy, varentropy,"),
        ({"entropy": TABLE[::-1]}, "quantiles.entropy must be 101 numbers in ascending order"),
        ({"entropy": TABLE[1:]}, "quantiles.entropy must be 101 numbers"),
        ({"entropy": [*TABLE[:-1], math.nan]}, "quantiles.entropy must be 101 numbers"),
        ({"entropy": [-1.0, *TABLE[1:]]}, "quantiles.entropy must be 101 numbers"),
        ({"entropy": ["0", *TABLE[1:]]}, "quantiles.entropy must be 101 numbers"),
        ({"at_entropy": {}}, "at_entropy: must hold tables in ascending order"),
        ({"at_entropy": {"entropy": TABLE}}, "at_entropy: must hold tables in ascending order"),
        ({"model": None}, "'model' and 'tokens' are missing"),
        ({"tokens": "many"}, "'model' and 'tokens' are missing"),
        ({"tokens": True}, "'model' and 'tokens' are missing or malformed"),
    ],
)
def test_invalid_files(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    """Each error is one line that ends with the command that renews the file."""
    own = content()
    for name, value in changes.items():
        (own["quantiles"] if name in TABLES else own)[name] = value
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(own))
    with pytest.raises(UserError) as error:
        read_calibration(path, RENEW)
    assert str(error.value).startswith(f"{path}: {complaint}")
    assert str(error.value).endswith(f": run {RENEW}")


def test_tables_of_another_model_are_refused() -> None:
    own = calibration()
    own.check_model(dict(MODEL), "a file", RENEW)
    with pytest.raises(UserError) as error:
        own.check_model({**MODEL, "layers": 5}, "a file", RENEW)
    assert str(error.value) == (
        "a file: measured on a model with layers 4, width 192, heads 6, "
        f"this one has layers 5, width 192, heads 6: run {RENEW}"
    )


# Shipped tables


@pytest.mark.parametrize(
    ("quantity", "percent", "threshold"),
    [
        ("entropy", 30, "0.43"),
        ("entropy", 70, "3.61"),
        ("varentropy", 40, "2.50"),
        ("varentropy", 75, "5.20"),
    ],
)
def test_anchors_of_the_generic_table(quantity: str, percent: float, threshold: str) -> None:
    """The anchors equal the public implementation's thresholds, in bits."""
    own = generic_calibration()
    assert own.generic
    assert f"{own.value(quantity, percent):.2f}" == threshold


def test_the_generic_table_equals_the_output_of_its_script() -> None:
    weights = script.WEIGHTS
    base = read_calibration(weights / "smollm2" / "calibration.json")
    own = generic_calibration()
    for name in TABLES:
        expected = base.quantiles[name]
        if name in script.ANCHORS:
            expected = script.rescale(expected, script.ANCHORS[name])
        np.testing.assert_allclose(own.quantiles[name], expected, rtol=1e-4, atol=1e-9)
    assert own.tokens == base.tokens
    assert own.model == {}

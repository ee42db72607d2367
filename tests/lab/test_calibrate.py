"""The command `calibrate`: its output, occupancies on held-out text, and bad input; and the
embedded model's own calibration."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.lab import calibrate
from entropix_jax.lab.boxes import occupancy, read_boxes
from entropix_jax.lab.likelihood import measure_entropies
from entropix_jax.lab.world.corpus import write_row
from entropix_jax.lab.world.facts import WORLD_SEED, create
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.names import REGIMES
from entropix_jax.sampler.presets import load_sampler
from tests.support.commands import Result, refusal, run_command
from tests.support.model_folders import write_model
from tests.support.runs import Spec, run_specs

WANTED = {"lelv": 0.55, "helv": 0.07, "lehv": 0.03, "hehv": 0.03}
SHARES = [f"{regime}={share}" for regime, share in WANTED.items()]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of the world's text, some 25,000 tokens."""
    folder = tmp_path_factory.mktemp("texts")
    return [write(folder / f"{i}.txt", seed=i) for i in range(4)]


def write(path: Path, seed: int) -> str:
    row = write_row(create(WORLD_SEED), Random(seed), 6500)
    path.write_text("".join(position.terminal for position in row))
    return str(path)


def command(*arguments: object) -> Result:
    chosen = () if "--model" in arguments else ("--model", "tiny")
    return run_command(calibrate.main, *arguments, *chosen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "wanted"),
    [
        ("quadrants", WANTED),
        ("document-004", {"lelv": 0.53, "helv": 0.09, "lehv": 0.05, "hehv": 0.03}),
    ],
)
def test_the_wanted_occupancy_holds_on_other_text(
    tiny: LanguageModel, texts: list[str], tmp_path: Path, base: str, wanted: dict[str, float]
) -> None:
    """Within 2 percentage points, on 20,000 held-out tokens."""
    output = tmp_path / "mine.toml"
    shares = [f"{regime}={share}" for regime, share in wanted.items()]
    result = command("--texts", *texts, "--wanted", *shares, "--sampler", base, "--output", output)
    assert result.status == 0, result.err
    sampler = calibrate_sampler(load_sampler(str(output)), tiny)
    assert sampler.notes == ()  # its own thresholds, not the model's
    others = [Path(write(tmp_path / f"{i}.txt", seed=100 + i)).read_text() for i in range(4)]
    tokens = [tiny.tokenizer.encode(text, add_bos=True) for text in others]
    points = measure_entropies(tiny, tokens, sampler)
    assert len(points) >= 20_000
    thresholds = {key: sampler.values[f"thresholds.{key}"] for key in ("h1", "h2", "u1", "u2")}
    reached = occupancy(points, thresholds, read_boxes(sampler.sampler))
    for regime in REGIMES:
        share = wanted.get(regime, 1 - sum(wanted.values()))
        assert reached[regime] == pytest.approx(share, abs=0.02), reached
    assert max(map(len, result.out.splitlines())) <= 80


@pytest.mark.slow
def test_the_models_own_text_and_its_calibration_file(tmp_path: Path) -> None:
    def calibrated(*more: object) -> Any:
        output = tmp_path / "calibration.json"
        arguments = ("--self", "--self-tokens", 3200, "--wanted", *SHARES, "--output", output)
        assert command(*arguments, *more).status == 0
        return json.loads(output.read_text())

    first = calibrated()
    assert set(first["thresholds"]) == {"h1", "h2", "u1", "u2"}
    assert "3200 tokens" in first["source"]
    assert calibrated() == first  # the same seed, the same text
    assert calibrated("--seed", 5) != first


def test_shares_out_of_reach(texts: list[str], tmp_path: Path) -> None:
    """The nearest ones are taken, with a note, or refused with --strict."""
    output = tmp_path / "mine.toml"
    impossible = ["lelv=0.1", "helv=0.6", "lehv=0.1", "hehv=0.1"]
    arguments = ("--texts", texts[0], "--wanted", *impossible, "--output", output)
    assert "the nearest that it allows is lelv" in refusal(command(*arguments, "--strict"))
    assert not output.exists()
    result = command(*arguments)
    assert result.status == 0
    note, written = result.err.splitlines()
    assert note.startswith("note: the text does not allow lelv 10.0%, helv 60.0%, lehv 10.0%")
    assert re.search("the nearest that it allows is lelv .*%, mid .*%$", note)
    assert written == f"{output}: written"


def test_any_model(tmp_path: Path) -> None:
    """With few positions and no BOS token: more batches of shorter rows, from the EOS token."""
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings = {key: value for key, value in settings.items() if key != "bos_token"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": False}))
    assert load(str(folder)).tokenizer.encode("", add_bos=True) == []
    output = tmp_path / "calibration.json"
    result = command("--model", folder, "--output", output, "--self-tokens", 3000)
    assert result.status == 0, result.err
    content = json.loads(output.read_text())
    assert content["source"] == "3008 tokens of the model's own text"  # twice 32 of 47


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--self", "--output", "x.txt"), "a sampler file ends in .toml"),
        (("--self", "--output", "/no/such/folder/x.toml"), "no folder /no/such/folder"),
        (("--self", "--output", "x.toml", "--wanted", "lelv"), "--wanted lelv: expected REGIME"),
        (("--self", "--output", "x.toml", "--wanted", "mid=0.2"), "--wanted mid=0.2"),
        (("--self", "--output", "x.toml", "--self-tokens", 3), "--self-tokens must be at least 64"),
        (("--self", "--output", "x.toml", "--sampler", "document-001"), "cannot be calibrated"),
    ],
)
def test_bad_input(
    arguments: tuple[object, ...], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert complaint in refusal(command(*arguments))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("output", ["own.toml", "base.toml", "link.toml", "text.json"])
def test_sources_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.json").write_text("Once upon a time")
    Path("base.toml").write_text('extends = "quadrants"\n')
    Path("own.toml").write_text('extends = "base.toml"\n[base]\ntop_k = 3\n')
    Path("link.toml").symlink_to("own.toml")
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    result = command("--texts", "text.json", "--sampler", "own.toml", "--output", output)
    assert refusal(result).startswith(f"error: {output}: would take the place of its own source")
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


# The embedded model, as it is shipped


@pytest.mark.slow
def test_all_regimes_occur_in_ordinary_text(tiny: LanguageModel) -> None:
    """10,000 tokens of the default sampler, from nothing: each regime at least 20 times."""
    start = tiny.tokenizer.encode("", add_bos=True)
    requests = [Spec(start, str(row), 500) for row in range(20)]
    rows = run_specs(tiny, requests, ignore_eos=True).run()
    tokens = [token for row in rows for token in row.tokens]
    assert len(tokens) == 10_000
    counts = Counter(token.regime for token in tokens)
    assert all(counts[regime] >= 20 for regime in REGIMES), counts
    # With a branching budget that never runs out, nothing is explored instead. Loops are rare.
    served = {*"argmax inject branch backspace adaptive sample".split()}
    assert served <= {token.action for token in tokens} <= {*served, "resample"}

"""The command `calibrate`: its file, tables and bad input, and the shipped files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_prompts
from safetensors.numpy import load_file, save_file

from entropix_jax.engine.api import Generation
from entropix_jax.engine.calibrated import model_shape
from entropix_jax.engine.request import Request
from entropix_jax.engine.tokens import encode_prompt
from entropix_jax.lab import answers
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.calibration import PERCENTS, TABLES, read_calibration
from entropix_jax.sampler.presets import load_sampler
from tests.support.commands import Result, refusal, run_command
from tests.support.runs import calibrated

WEIGHTS = Path(__file__).parents[2] / "weights"
PROMPTS = ("Guests:", "Anna lives in", "12 + 7 =", "Dear diary")
RECORDS = (
    {"prompt": "Where does"},
    {"messages": [{"role": "user", "content": "What is 14 + 38?"}]},
    {"id": "story", "messages": [{"role": "user", "content": "Tell a story."}]},
    {"prompt": "Singers: Victor, Adam"},
)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\ufeff" + "\n".join(("", *PROMPTS, " ")))
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "mine.json"


def command(*arguments: object, model: object = "tiny") -> Result:
    return run_command("calibrate", "--model", model, *arguments)


def succeed(*arguments: object, model: object = "tiny") -> Result:
    result = command(*arguments, model=model)
    assert result.status == 0, result.err
    return result


def read_tables(path: Path) -> dict[str, np.ndarray]:
    return dict(read_calibration(path).quantiles)


def test_the_tables_are_quantiles_of_the_answers(
    tiny: LanguageModel, prompts: Path, output: Path
) -> None:
    result = succeed("--prompts", prompts, "--output", output, "--seed", 3, "--samples", 2)
    calibration = read_calibration(output)
    calibration.check_model(model_shape(tiny), "", "")
    assert calibration.source.startswith("8 answers to 4 prompts of prompts.txt, by min-p, at")

    sampler = calibrated(tiny, load_sampler("min-p"))
    requests = [
        Request(
            encode_prompt(tiny, prompt, chat=False),
            sampler,
            max_new_tokens=128,
            row_id=str(i + 2),  # the line of the file
            seed=seed,
            eos_ids=tiny.eos_ids,
        )
        for seed in (3, 4)
        for i, prompt in enumerate(PROMPTS)
    ]
    tokens = [token for row in Generation(tiny, requests).run() for token in row.tokens]
    assert calibration.tokens == len(tokens)
    for name in TABLES:
        expected = np.percentile([getattr(token, name) for token in tokens], PERCENTS)
        np.testing.assert_allclose(calibration.quantiles[name], expected, rtol=1e-4, atol=1e-4)

    first, *_, last = result.err.splitlines()  # a slow run also prints its progress
    assert (first, last) == ("answering 4 prompts", f"{output}: written")
    assert f"{len(tokens)} tokens" in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    assert {path.name for path in output.parent.iterdir()} == {"prompts.txt", "mine.json"}


def test_conversations_and_the_seed(tmp_path: Path, output: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    contents = []
    for seed in (0, 0, 1):
        succeed("--prompts", path, "--output", output, "--seed", seed)
        contents.append(output.read_text())
    assert contents[0] == contents[1] != contents[2]


def test_the_models_own_prompts_are_the_default(prompts: Path, tmp_path: Path) -> None:
    """The tables of `tiny` are thus not replaced by those of prompts that it cannot answer. The
    default output is in the model's folder, where an invalid file is replaced, too."""
    folder = copy_tiny(tmp_path)
    path = folder / "calibration.json"
    path.write_text('{"thresholds": {"h1": 0.3}}')
    (folder / "calibration_prompts.jsonl").write_text('{"prompt": "Guests:"}\n')
    assert succeed(model=folder).err.endswith(f"{path}: written\n")
    assert "1 prompts of calibration_prompts.jsonl" in read_calibration(path).source
    succeed("--prompts", prompts, model=folder)
    assert f"of {prompts.name}" in read_calibration(path).source


def test_nan_logits_are_an_error(prompts: Path, tmp_path: Path, tiny: LanguageModel) -> None:
    folder = copy_tiny(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    token = encode_prompt(tiny, PROMPTS[1], chat=False)[-1]
    tensors["model.embed_tokens.weight"][token] = np.nan
    save_file(tensors, folder / "model.safetensors")
    error = refusal_after_progress(command("--prompts", prompts, model=folder))
    assert error.startswith("error: prompt ")
    assert "NaN" in error


def refusal_after_progress(result: Result) -> str:
    # A note on the model may come first.
    before, found, rest = result.err.partition("answering")
    assert found
    assert before.count("\n") <= 1
    rest = rest.partition("\n")[2]
    return refusal(result._replace(err=rest))


def copy_tiny(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(WEIGHTS / "tiny", folder)
    (folder / "calibration.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("content", "arguments", "complaint"),
    [
        ("", ("--prompts", "x.txt"), "x.txt: contains no prompt"),
        ("\n  \n", ("--prompts", "x.txt"), "x.txt: contains no prompt"),
        ("", ("--prompts", "x.jsonl"), "x.jsonl: holds no records"),
        ('{"prompt": ""}', ("--prompts", "x.jsonl"), "x.jsonl: line 1: 'prompt' is empty"),
        ("Guests:", ("--prompts", "x.jsonl"), "x.jsonl: line 1: not valid JSON"),
        ('{"messages": [{}]}', ("--prompts", "x.jsonl"), "prompt 1: "),
        ("a " * 5000, ("--prompts", "x.txt"), "prompt 1: the prompt has"),
        ("Guests:", ("--prompts", "no.txt"), "no.txt: no such file"),
        ("Guests:", ("--prompts", "x.txt", "--seed", -1), "--seed must be at least 0"),
        ("Guests:", ("--output", "mine.toml"), "--output mine.toml: the name of a calibration"),
        ("Guests:", ("--output", "no/mine.json"), "cannot be written: no folder no"),
        ("Guests:", ("--prompts", "x.json", "--output", "x.json"), "x.json: would"),
        ("Guests:", ("--sampler", "entropix"), "--sampler needs --task"),
        ("Guests:", ("--task", "sums", "--prompts", "x.txt"), "--prompts cannot be used with"),
        ("Guests:", ("--task", "sum"), "no task 'sum', did you mean 'sums'"),
    ],
)
def test_bad_input(
    content: str,
    arguments: tuple[object, ...],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x.txt", "x.jsonl", "x.json"):
        Path(name).write_text(content)
    more = () if "--output" in arguments else ("--output", "mine.json")
    assert complaint in refusal(command(*arguments, *more))
    assert {path.name for path in tmp_path.iterdir()} == {"x.txt", "x.jsonl", "x.json"}


TASK = """
from entropix_jax.lab.tasks.task import Item, Task

class Names(Task):
    name, chat, max_new_tokens = "names", False, 6

    def items(self, split, *, chat):
        for i in range(12):
            yield Item(f"{split}-{i}", f"Guests: {chr(65 + i)}", "")

    def extract(self, item, text):
        return text

    def score(self, item, answer):
        return float(int(item.id.partition("-")[2]) % 2)

TASK = Names()
"""


def test_the_table_of_p_wrong(tmp_path: Path) -> None:
    """It is added to the model's tables."""
    path = tmp_path / "task.py"
    path.write_text(TASK)
    folder = copy_tiny(tmp_path)
    task = ("--task", f"{path}:TASK")
    assert "run entropix-jax calibrate --model" in refusal(command(*task, model=folder))
    shutil.copy(WEIGHTS / "tiny" / "calibration.json", folder)
    result = succeed(*task, model=folder)
    assert result.out.startswith(
        "6 of 12 answers by greedy are wrong\ncalibration error of P(wrong)"
    )
    own = folder / "calibration.json"
    found, before = (
        read_calibration(each).to_json() for each in (own, WEIGHTS / "tiny" / own.name)
    )
    entry = found.pop("wrong")
    assert found == before
    assert (entry["task"], entry["items"]) == ("names", 12)


# Shipped files


@pytest.mark.parametrize("name", ["calibration_prompts.jsonl", "calibration_beginnings.jsonl"])
def test_the_packaged_prompts(name: str) -> None:
    prompts = answers.read_prompts(Path(answers.__file__).with_name(name))
    assert len(prompts) == 48
    assert len({str(prompt.prompt) for prompt in prompts}) == 48


@pytest.mark.parametrize("name", ["tiny", "asking"])
def test_the_shipped_prompts_equal_the_output_of_their_script(name: str) -> None:
    file = WEIGHTS / name / "calibration_prompts.jsonl"
    expected = [json.loads(json.dumps(each)) for each in tiny_prompts.prompts(name)]
    assert [json.loads(line) for line in file.read_text().splitlines()] == expected


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("tiny", "answers to 48 prompts of calibration_prompts.jsonl"),
        ("smollm2", "answers to 48 prompts of entropix_jax"),
    ],
)
def test_the_shipped_tables(name: str, source: str, tiny: LanguageModel) -> None:
    calibration = read_calibration(WEIGHTS / name / "calibration.json")
    assert calibration.source.startswith(source)
    assert calibration.tokens > 500
    if name == "tiny":
        calibration.check_model(model_shape(tiny), "", "")

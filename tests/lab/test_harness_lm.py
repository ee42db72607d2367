"""The lm-evaluation-harness on the embedded model: its results, and whole runs without a
network."""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import entropix_jax
from entropix_jax.__main__ import main
from entropix_jax.errors import UserError
from entropix_jax.lab.likelihood import log_likelihoods
from entropix_jax.lab.world.problems import problems
from tests.support import reference
from tests.support.runs import Spec, run_specs

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install -e .[harness]")

from lm_eval.api.instance import Instance

from entropix_jax.lab.harness_lm import EntropixLM

ROOT = Path(__file__).parents[2]
EMBEDDED = ROOT / "weights" / "tiny"
SUMS = problems("sum", "test", 12, 0)
ASKED = [{"role": "user", "content": SUMS[0].question}]
WORDS = [problem.prompt for problem in problems("word", "test", 7, 0)]


def make(**arguments: Any) -> EntropixLM:
    # One batch size, so that few programs are compiled.
    usual: dict[str, Any] = {"pretrained": str(EMBEDDED), "sampler": "greedy", "batch_size": 4}
    return EntropixLM(**(usual | arguments))


@pytest.fixture(scope="module")
def greedy() -> EntropixLM:
    return make()


def ask(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, one, 0) for one in arguments]


def write(lm: EntropixLM, *asked: tuple[str, dict[str, Any]]) -> list[str]:
    return lm.generate_until(ask("generate_until", *asked), disable_tqdm=True)


# Log-likelihoods


def ids(lm: EntropixLM, text: str) -> list[int]:
    return lm.model.tokenizer.encode(text, add_bos=False)


def score(lm: EntropixLM, before: list[int], after: list[int]) -> tuple[float, bool]:
    """Returns the log-likelihood in float64, and whether it is greedy."""
    return reference.continuation(lm.model.params, lm.model.config, before, after)


def test_harness_log_likelihoods_equal_float64(greedy: EntropixLM) -> None:
    """Covers all forms of a context. A space at its end belongs to the continuation."""
    asked = [(p.prompt, f" {answer}") for p in SUMS for answer in (p.answer, p.answer + 1)]
    asked += [("", WORDS[0]), ("12 + 7 = ", "19."), (f"{WORDS[1]} {WORDS[2]}", f" {WORDS[3]}")]
    asked += [("<|begin_of_text|>12 + 7 =", " 19"), ("", "<|begin_of_text|>12"), (" ", "12")]
    found = greedy.loglikelihood(ask("loglikelihood", *asked), disable_tqdm=True)
    name = "<|begin_of_text|>"
    for (context, continuation), (total, flag) in zip(asked, found, strict=True):
        whole = ids(greedy, (context + continuation).removeprefix(name))
        before = ids(greedy, context.rstrip().removeprefix(name))
        assert whole[: len(before)] == before
        want = score(greedy, [greedy.prefix_token_id, *before], whole[len(before) :])
        assert (total, flag) == (pytest.approx(want[0], abs=1e-4), want[1])
    assert {flag for _, flag in found} == {True, False}
    # One token has the end of the context and the continuation, which is then encoded by itself.
    ((total, flag),) = greedy.loglikelihood(ask("loglikelihood", ("Gue", "sts")), True)
    after = greedy.model.tokenizer.encode_within("sts")
    want = score(greedy, greedy.tok_encode("Gue"), after)
    assert len(ids(greedy, "Guests")) <= len(ids(greedy, "Gue"))
    assert (total, flag) == (pytest.approx(want[0], abs=1e-4), want[1])
    with pytest.raises(UserError, match="pair 0: the continuation is empty"):
        greedy.loglikelihood(ask("loglikelihood", ("Anna", "")), True)


@pytest.mark.parametrize("length", [None, 64, 41])
def test_rolling_log_likelihoods(length: int | None) -> None:
    """Each token counts once. A text that is too long is scored in blocks, each with as much
    context as fits before the block's end."""
    lm = make(max_length=length)
    texts = [WORDS[0], " ".join(WORDS), "Anna", ""]
    found = lm.loglikelihood_rolling(ask("loglikelihood_rolling", *[(t,) for t in texts]), True)
    for text, total in zip(texts, found, strict=True):
        tokens = [lm.prefix_token_id, *ids(lm, text)]
        size = length or len(tokens)
        want, blocks = 0.0, range(1, len(tokens), size)
        for told in blocks:
            end = min(told + size, len(tokens))
            want += score(lm, tokens[max(end - size - 1, 0) : told], tokens[told:end])[0]
        # Rounding grows with the number of blocks, and with the total of a long text.
        assert total == pytest.approx(want, rel=1e-6, abs=1e-4 * len(blocks))
    assert found[-1] == 0.0
    assert len(ids(lm, texts[1])) > 128


# Generation

UNTIL: dict[str, Any] = {"until": ["."], "max_gen_toks": 8}
THREE = [(problem.prompt, UNTIL) for problem in SUMS[:3]]


def test_greedy_texts_equal_generate(greedy: EntropixLM) -> None:
    """Each request has its own budget and stop strings, and results keep the order of requests."""
    asked = [(p.prompt, UNTIL) for p in SUMS[:4]]
    asked += [(WORDS[0], {"until": "Answer", "max_gen_toks": 40}), (WORDS[1], {"max_gen_toks": 5})]
    asked += [(WORDS[2], {"until": [], "max_new_tokens": 60}), (SUMS[0].prompt, {"until": None})]
    found = write(greedy, *asked)
    for (context, said), text in zip(asked, found, strict=True):
        budget = said.get("max_gen_toks", said.get("max_new_tokens", 256))
        options: dict[str, Any] = {"stop": said.get("until") or (), "max_new_tokens": budget}
        (row,) = entropix_jax.generate(greedy.model, context, "greedy", chat=False, **options)
        assert text == row.text
    assert [text.strip() for text in found[:4]] == [str(p.answer) for p in SUMS[:4]]


def test_texts_depend_on_neither_order_nor_batch() -> None:
    """The sampler is random. A repeated context gets a different sample."""
    hot: dict[str, Any] = {"sampler": "temperature", "sampler.base.temperature": 1.5}
    lm = make(**hot)
    asked = [(text, {"max_gen_toks": 12}) for text in ("The", "Once", "Anna", "12 +", "If", "The")]
    found = write(lm, *asked)
    assert found[0] != found[-1]
    assert write(lm, *asked) == found
    assert write(make(**hot, batch_size=1), *asked[::-1])[1:-1] == found[-2:0:-1]
    assert write(make(**hot, seed=1), *asked) != found


def test_a_control_token_as_a_stop_string(greedy: EntropixLM) -> None:
    """A control token has no text, but ends the row, and is not part of the result."""
    turn = "<|start_header_id|>user"
    said = {"max_gen_toks": 9}
    stopped = said | {"until": ["<|end_header_id|>"]}
    chat = greedy.apply_chat_template(ASKED)
    free, cut, answer = write(greedy, (turn, said), (turn, stopped), (chat, {"max_gen_toks": 30}))
    assert free
    assert cut == ""
    assert answer.endswith(f"{SUMS[0].answer}.")  # the end of the turn needs no stop string


def test_a_long_prompt_leaves_room_for_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    lm = make(max_length=40)
    context = " ".join([*WORDS, SUMS[0].prompt])
    text, *_ = write(lm, (context, UNTIL), *THREE)
    kept = lm.model.tokenizer.encode(context, add_bos=True)[-(40 - UNTIL["max_gen_toks"]) :]
    (row,) = run_specs(lm.model, [Spec(kept, "0", UNTIL["max_gen_toks"])], "greedy", stop=".").run()
    assert text == row.text
    assert "1 of 4 requests do not fit into the 40 tokens" in caplog.text
    lm.loglikelihood(ask("loglikelihood", (context, " 19."), (context, " 20.")), disable_tqdm=True)
    assert "2 of 2 requests do not fit into the 40 tokens" in caplog.text
    with pytest.raises(UserError, match="max_gen_toks 40: the model sees 40 tokens"):
        write(lm, (context, {"max_gen_toks": 40}))


def test_answers_are_cached_as_they_arrive(greedy: EntropixLM) -> None:
    """Checks the calls of the harness's cache hook."""
    kept: list[Any] = []
    lm: Any = make()
    lm.set_cache_hook(SimpleNamespace(add_partial=lambda *one: kept.append(one)))
    pair, text = (SUMS[0].prompt, " 1"), (WORDS[0],)
    (score,) = lm.loglikelihood(ask("loglikelihood", pair), True)
    (total,) = lm.loglikelihood_rolling(ask("loglikelihood_rolling", text), True)
    assert kept == [("loglikelihood", pair, score), ("loglikelihood_rolling", text, total)]
    kept.clear()
    texts = write(lm, *THREE)
    wanted = [("generate_until", *both) for both in zip(THREE, texts, strict=True)]
    assert sorted(kept) == sorted(wanted)


# Chats


def test_chats(greedy: EntropixLM) -> None:
    text, tokenizer = greedy.apply_chat_template(ASKED), greedy.model.tokenizer
    assert greedy.tok_encode(text) == tokenizer.apply_chat(ASKED)  # one beginning of text
    assert greedy.chat_template(True) == tokenizer.chat_template
    assert greedy.tokenizer_name == str(EMBEDDED).replace("/", "__")
    for end, kept in (("Answer:", "Answer:"), (" Answer: ", "Answer:")):
        begun = [*ASKED, {"role": "assistant", "content": end}]
        assert greedy.apply_chat_template(begun, add_generation_prompt=False) == text + kept
    lm, bare = make(), copy.copy(tokenizer)
    bare.chat_template = None
    lm.model, lm.tokenizer = replace(lm.model, tokenizer=bare), bare
    with pytest.raises(UserError, match="no chat template: leave --apply_chat_template out"):
        lm.apply_chat_template(ASKED)
    assert lm.chat_template(True) is None


# Errors


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"sampler": "entropics"}, "no sampler preset 'entropics'.*, did you mean 'entropix'?"),
        ({"sampler.base.temprature": 1}, "no sampler key 'base.temprature'"),
        ({"max_lenght": 64}, "no model argument 'max_lenght', did you mean 'max_length'?"),
        ({"max_length": 5000}, "max_length 5000: the model has 4096 positions"),
        ({"batch_size": "many"}, "batch_size must be an integer, not 'many'"),
        ({"seed": float("inf")}, "seed must be an integer, not inf"),
        ({"batch_size": 10**400}, "batch_size must be at most 2147483647, not 1000000"),
        ({"dtype": "float16"}, "dtype must be float32, bfloat16, int8 or auto, not 'float16'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        make(**arguments)


def test_non_finite_logits_are_reported() -> None:
    lm = make()
    bad = replace(lm.model.params, embedding=lm.model.params.embedding * math.nan)
    lm.model = replace(lm.model, params=bad)
    with pytest.raises(UserError, match=r"^request 0: NaN or infinite logits at position"):
        write(lm, *THREE)
    with pytest.raises(UserError, match="pair 0: NaN or infinite logits at position"):
        lm.loglikelihood(ask("loglikelihood", ("Anna", " has")), True)


def test_without_the_harness(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "entropix_jax.lab.harness_lm")
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    assert main(["harness", "--help"]) == 0
    assert "pip install 'entropix-jax[harness]'" in capsys.readouterr().out
    assert main(["harness", "--tasks", "anything"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    missing = "error: the lm-evaluation-harness is missing: pip install 'entropix-jax[harness]'"
    assert line.startswith(missing)


# Whole runs

TASKS = {
    "local_choice": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
""",
    "local_sums": r"""
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\n"], max_gen_toks: 40}
filter_list:
  - name: number
    filter:
      - {function: regex, regex_pattern: '(\d+)\.', group_select: -1}
      - {function: take_first}
metric_list: [{metric: exact_match}]
""",
    "local_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{prompt}}"
metric_list: [{metric: word_perplexity}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks, with a file of settings for each, and shared data."""
    folder = tmp_path_factory.mktemp("tasks")
    records = [
        {
            "prompt": problem.prompt,
            "question": problem.question,
            "answer": str(problem.answer),
            "choices": [f"{problem.prompt} {problem.answer + i}." for i in (1, 10, 0, -1)],
            "label": 2,
        }
        for problem in SUMS
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    data = {"data_files": {"test": str(folder / "sums.jsonl")}, "cache_dir": str(folder / "cache")}
    shared = f"dataset_path: json\ntest_split: test\ndataset_kwargs: {json.dumps(data)}\n"
    shared += 'metadata: {version: 1}\ntarget_delimiter: ""\n'
    for name, text in TASKS.items():
        asked = "" if "doc_to_text" in text else 'doc_to_text: "{{question}}"\n'
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{shared}{asked}{text}")
    return folder


def test_the_command(tasks: Path, greedy: EntropixLM, tmp_path: Path) -> None:
    """Runs the command in a process without network access."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "entropix_jax", "harness"),
            *("--model_args", f"pretrained={EMBEDDED},sampler=greedy,seed=1", "-b", "4"),
            *("--tasks", ",".join(TASKS), "--include_path", str(tasks)),
            *("--apply_chat_template", "--log_samples", "--output_path", str(tmp_path / "out")),
        ],
        cwd=ROOT,
        env=os.environ | offline,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^entropix_jax \(.*batch_size: 4$", done.stdout, re.MULTILINE)
    (path,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(path.read_text())
    config, results = found["config"], found["results"]
    assert (config["sampler"], config["sampler_seed"]) == ("greedy", 1)
    assert config["sampler_values"]["arms.lehv"] == "argmax"
    assert results["local_choice"]["acc,none"] > 0.9
    assert results["local_sums"]["exact_match,number"] > 0.9
    # The harness defines it per word, over all texts.
    encode = greedy.model.tokenizer.encode
    pairs = [(ids[:1], ids[1:]) for ids in (encode(p.prompt, add_bos=True) for p in SUMS)]
    nats = sum(score for _, score, _ in log_likelihoods(greedy.model, pairs))
    perplexity = math.exp(-nats / sum(len(re.split(r"\s+", p.prompt)) for p in SUMS))
    assert results["local_text"]["word_perplexity,none"] == pytest.approx(perplexity, rel=1e-4)
    (path,) = (tmp_path / "out").rglob("samples_local_sums_*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    contexts = [line["arguments"]["gen_args_0"]["arg_0"] for line in lines]
    again = write(
        greedy, *[(context, {"until": ["\n"], "max_gen_toks": 40}) for context in contexts]
    )
    assert [line["resps"] for line in lines] == [[[text]] for text in again]


def test_the_arguments_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the arguments that the harness's own command receives."""
    seen: list[str] = []
    own = importlib.import_module("lm_eval.__main__")
    monkeypatch.setattr(own, "cli_evaluate", lambda: seen.extend(sys.argv[1:]))
    before = list(sys.argv)
    for given, passed in (
        ("-t a", "run --model entropix_jax --batch_size auto -t a"),
        ("run -t a", "run --model entropix_jax --batch_size auto -t a"),
        ("-M hf", "run --model entropix_jax --batch_size auto -M hf"),
        ("--config a.yaml", "run --model entropix_jax --config a.yaml"),
        ("ls tasks --ray=host:1", "ls tasks"),
        ("", "run"),
    ):
        seen.clear()
        assert main(["harness", *given.split()]) == 0
        assert seen == passed.split()
        assert EntropixLM.ray == ("host:1" if "--ray" in given else None)
    assert sys.argv == before

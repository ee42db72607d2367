"""The harness's OpenAI API clients get the same results as the harness in process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropix_jax.lab.world.problems import problems
from tests.support.servers import Running

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install -e .[comparison]")
pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -e .[comparison]"
)
pytest.importorskip("tenacity", reason="tenacity is not installed: pip install -e .[comparison]")

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from entropix_jax.lab.harness_lm import EntropixLM

EMBEDDED = Path(__file__).parents[2] / "weights" / "tiny"
SUMS = problems("sum", "test", 6, 0)


@pytest.fixture(scope="module")
def here() -> EntropixLM:
    return EntropixLM(pretrained=str(EMBEDDED), sampler="greedy", batch_size=4, max_length=256)


def ask(kind: str, *arguments: Any) -> list[Instance]:
    return [Instance(kind, {}, one, 0) for one in arguments]


def completions(running: Running, **options: Any) -> Any:
    usual = {"model": "tiny", "tokenizer": str(EMBEDDED), "add_bos_token": True, "max_retries": 1}
    return LocalCompletionsAPI(base_url=f"{running.url}/v1/completions", **usual, **options)


def test_served_log_likelihoods_equal_local_ones(running: Running, here: EntropixLM) -> None:
    pairs = [
        (one.prompt, answer) for one in SUMS for answer in (" 1", f" {one.answer}", " Rita sang")
    ]
    asked = ask("loglikelihood", *pairs)
    there = completions(running, batch_size=3).loglikelihood(asked, disable_tqdm=True)
    wanted = here.loglikelihood(asked, disable_tqdm=True)
    np.testing.assert_allclose([x for x, _ in there], [x for x, _ in wanted], atol=1e-3)
    assert [greedy for _, greedy in there] == [greedy for _, greedy in wanted]
    assert {greedy for _, greedy in there} == {True, False}


def test_served_texts_equal_local_ones(running: Running, here: EntropixLM) -> None:
    options = {"until": ["\n"], "max_gen_toks": 24, "do_sample": False}
    asked = ask("generate_until", *((one.prompt, options) for one in SUMS))
    wanted = here.generate_until(asked, disable_tqdm=True)
    lm: Any = completions(running, num_concurrent=4)
    assert lm.generate_until(asked, disable_tqdm=True) == wanted
    assert len({*wanted}) > 1
    talks = [[{"role": "user", "content": one.question}] for one in SUMS]
    lm = LocalChatCompletion(base_url=f"{running.url}/v1/chat/completions", model="tiny")
    asked = ask("generate_until", *((lm.apply_chat_template(talk), options) for talk in talks))
    same = ask("generate_until", *((here.apply_chat_template(talk), options) for talk in talks))
    wanted = here.generate_until(same, disable_tqdm=True)
    assert lm.generate_until(asked, disable_tqdm=True) == wanted

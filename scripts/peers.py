"""Other engines that are installed, at the same shape and precision.

Weights are random, except those of a GGUF file in llama.cpp. `transformers` gets a context of
random keys and values. llama.cpp reads a prompt instead, outside the clock. Nothing is loaded or
written before the first timing, so that an engine that fails fails there.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import gguf
import ml_dtypes
import numpy as np
from llama_1b import transformers_config
from timing import Timed

from entropix_jax.engine.request import Request
from entropix_jax.errors import UserError
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.precision import INT8


class Peer(Protocol):
    """Times one step, or one prompt. None if the engine cannot run it."""

    name: str

    def decode(self, batch: int, context: int, steps: int) -> Timed | None: ...

    def prefill(self, tokens: int) -> Timed | None: ...


def find_peers(
    config: ModelConfig, weights: str, source: Path | None, scratch: Path
) -> Iterator[Peer]:
    """Yields the installed engines that can run a model.

    Args:
        weights: the type of the weights. llama.cpp takes the file's instead.
        source: a folder or GGUF file; None for random weights of `config`.
        scratch: the folder for a file with random weights for llama.cpp.
    """
    if weights != INT8 and all(map(importlib.util.find_spec, ("transformers", "torch"))):
        yield Transformers(config, source, weights)
    if shutil.which("llama-bench") and source is not None and source.is_file():
        yield LlamaCpp(f"llama.cpp, {source.stem.rpartition('.')[2]}", source, config)
    elif shutil.which("llama-bench") and source is None and weights == "bfloat16":
        yield LlamaCpp("llama.cpp", scratch / "random.gguf", config)


class Transformers:
    """`transformers` on torch, a plain loop over a dynamic cache."""

    name = "transformers"

    def __init__(self, config: ModelConfig, source: Path | None, weights: str) -> None:
        self._config, self._source, self._weights = config, source, weights

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

        torch.set_num_threads(os.cpu_count() or 1)
        if self._source is None:
            shape = LlamaConfig(**transformers_config(self._config))
        elif self._source.is_file():
            shape = AutoConfig.from_pretrained(self._source.parent, gguf_file=self._source.name)
        else:
            shape = AutoConfig.from_pretrained(self._source)
        dtype = getattr(torch, self._weights)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return AutoModelForCausalLM.from_config(shape, dtype=dtype).eval()

    def decode(self, batch: int, context: int, steps: int) -> Timed:
        """Times a step; the next token is the most likely one."""

        def seconds() -> float:
            import torch
            from transformers import DynamicCache

            model, config = self._model, self._config
            cache = DynamicCache(config=model.config)
            shape = (batch, config.num_kv_heads, context - 1, config.head_dim)
            with torch.inference_mode(), model.device:
                for layer in range(config.num_layers):
                    filling = (torch.randn(shape, dtype=model.dtype) for _ in range(2))
                    cache.update(*filling, layer)
                token = torch.zeros((batch, 1), dtype=torch.long)
                started = time.perf_counter()
                for _ in range(steps):
                    out = model(token, past_key_values=cache, use_cache=True)
                    token = out.logits[:, -1:].argmax(-1)
                token.cpu()
            return (time.perf_counter() - started) / steps

        return seconds

    def prefill(self, tokens: int) -> Timed:
        """Times the reading of a prompt."""

        def seconds() -> float:
            import torch

            model = self._model
            with torch.inference_mode(), model.device:
                ids = torch.randint(0, self._config.vocab_size, (1, tokens))
                started = time.perf_counter()
                model.model(ids, use_cache=True).last_hidden_state[0, -1, 0].item()
            return time.perf_counter() - started

        return seconds

    def batches(self, requests: Sequence[Request], size: int) -> Timed:
        """Times requests in static batches, greedily, each as long as its longest row."""

        def seconds() -> float:
            import torch

            model = self._model
            options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            started = time.perf_counter()
            for first in range(0, len(requests), size):
                batch = requests[first : first + size]
                longest = max(len(request.prompt) for request in batch)
                padded = [[0] * (longest - len(one.prompt)) + [*one.prompt] for one in batch]
                mask = [[0] * (longest - len(x.prompt)) + [1] * len(x.prompt) for x in batch]
                new = max(request.max_new_tokens for request in batch)
                with torch.inference_mode(), model.device:
                    ids, attended = torch.tensor(padded), torch.tensor(mask)
                    model.generate(ids, attention_mask=attended, max_new_tokens=new, **options)
            return time.perf_counter() - started

        return seconds


class LlamaCpp:
    """llama.cpp by its `llama-bench` on the path, and `llama-batched-bench` for batches."""

    def __init__(self, name: str, file: Path, config: ModelConfig) -> None:
        """A file that does not exist is written with random weights of `config`."""
        self.name, self._file, self._config = name, file, config

    def decode(self, batch: int, context: int, steps: int) -> Timed | None:
        """Times a step."""
        if context > 2048 or (batch > 1 and not shutil.which("llama-batched-bench")):
            return None
        if batch == 1:
            return lambda: self._bench("-p", 0, "-n", steps, "-d", context) / steps
        shape = ("-npp", context, "-ntg", steps, "-npl", batch, "-c", batch * (context + steps))
        words = ("llama-batched-bench", *shape, "--output-format", "jsonl")
        return lambda: self._run(*words)["t_tg"] / steps

    def prefill(self, tokens: int) -> Timed:
        """Times the reading of a prompt."""
        return lambda: self._bench("-p", tokens, "-n", 0)

    def _bench(self, *options: object) -> float:
        """Returns the seconds of one test. llama-bench warms up by itself."""
        return self._run("llama-bench", "-r", 1, "-o", "jsonl", *options)["avg_ns"] / 1e9

    def _run(self, *words: object) -> dict[str, Any]:
        """Returns the last line of JSON that a command on the model prints. UserError if there is
        none."""
        if not self._file.exists():
            write_random_gguf(self._file, self._config)
        command = [*map(str, words), "-m", str(self._file), "-t", str(os.cpu_count())]
        ran = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
        if not lines:
            said = ran.stderr.strip().rpartition("\n")[2]
            raise UserError(f"{words[0]} printed no figures (status {ran.returncode}): {said}")
        figures: dict[str, Any] = json.loads(lines[-1])
        return figures


def write_random_gguf(path: Path, config: ModelConfig) -> None:
    """Writes a Llama for llama.cpp: bfloat16 matrices, float32 norms, no vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    width, mlp = config.width, config.mlp_width
    sizes = {
        "context_length": config.max_positions,
        "embedding_length": width,
        "block_count": config.num_layers,
        "feed_forward_length": mlp,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    for name, size in sizes.items():
        writer.add_uint32(f"llama.{name}", size)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {"token_embd": (config.vocab_size, width), "output_norm": (width,)}
    for i in range(config.num_layers):
        layer = {
            "attn_norm": (width,),
            "attn_q": (queries, width),
            "attn_k": (keys, width),
            "attn_v": (keys, width),
            "attn_output": (width, queries),
            "ffn_norm": (width,),
            "ffn_gate": (mlp, width),
            "ffn_up": (mlp, width),
            "ffn_down": (width, mlp),
        }
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        raw = values.astype(ml_dtypes.bfloat16).view(np.uint8)
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.sync()  # else the disk is busy with it while the clock runs

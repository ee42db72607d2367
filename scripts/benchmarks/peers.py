"""What a user would run instead: each peer at the same shape and precision, where it is there.

Weights are random, but those of a GGUF file in llama.cpp, and a context is filled with random keys
and values where the peer lets one: neither changes what a step costs. llama.cpp reads a prompt
instead, outside the clock.
"""

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.shape import transformers_config
from benchmarks.timing import Timed
from entropix_jax.config import ModelConfig
from entropix_jax.precision import INT8


class Peer(Protocol):
    """Functions that give the seconds of one step, or one prompt; None where it cannot."""

    name: str

    def decode(self, batch: int, context: int, steps: int) -> Timed | None: ...

    def prefill(self, batch: int, tokens: int) -> Timed | None: ...


def peers_of(source: Path, weights: str) -> Iterator[Peer]:
    """Those that are installed and read the model at `source`, a folder or a GGUF file; llama.cpp
    has the weights of the file, whatever `weights` says."""
    if weights != INT8 and _has_transformers():
        yield Transformers(_config_at(source), weights)
    if source.is_file() and shutil.which("llama-bench"):
        yield LlamaCpp(f"llama.cpp, {source.stem.rpartition('.')[2]}", source)


def peers_at(
    config: ModelConfig,
    weights: str,
    scratch: Path,
    *,
    gpt_fast: Path | None,
    entropix: Path | None,
) -> Iterator[Peer]:
    """Those that are installed, or that a checkout was pointed to, with random weights; none has
    weights of 8 bits."""
    if weights == INT8:
        return
    if _has_transformers():
        from transformers import LlamaConfig

        shape = LlamaConfig(**transformers_config(config))
        yield Transformers(shape, weights)
        if _cuda():
            yield Transformers(shape, weights, compiled=True)
    if weights == "bfloat16" and shutil.which("llama-bench"):
        yield LlamaCpp("llama.cpp", _random_gguf(config, scratch))
    if gpt_fast is not None:
        yield GptFast(config, weights, gpt_fast)
    if entropix is not None and weights == "float32":
        yield Entropix(config, entropix)


class Transformers:
    """`transformers` on torch, a plain loop over its own cache; compiled, with a static cache."""

    def __init__(self, config: Any, weights: str, *, compiled: bool = False) -> None:
        """
        Args:
            config: `transformers`' own; the weights are random.
        """
        import torch
        from transformers import AutoModelForCausalLM

        self.name = "transformers, compiled" if compiled else "transformers"
        self._torch, self._compiled, self._config = torch, compiled, config
        self._device = "cuda" if _cuda() else "cpu"
        torch.set_num_threads(os.cpu_count() or 1)
        self._dtype = getattr(torch, weights)
        with torch.device(self._device):
            model = AutoModelForCausalLM.from_config(config, dtype=self._dtype)
        self._model = model.eval()

    def decode(self, batch: int, context: int, steps: int) -> Timed | None:
        from transformers import DynamicCache, StaticCache

        torch, config = self._torch, self._config
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token = torch.zeros((batch, 1), dtype=torch.long, device=self._device)
        step = self._model
        if self._compiled:
            torch._dynamo.reset()  # else another shape before makes this one's sizes dynamic
            step = torch.compile(step, mode="reduce-overhead", dynamic=False)
            cache: Any = StaticCache(config=config, max_cache_len=context + steps)
        else:
            cache = DynamicCache(config=config)
        with torch.inference_mode():
            for layer in range(config.num_hidden_layers):
                slots = [
                    torch.randn(
                        (batch, heads, context - 1, size), dtype=self._dtype, device=self._device
                    )
                    for _ in range(2)
                ]
                cache.update(*slots, layer)

        def seconds() -> float:
            if self._compiled:  # a static cache counts for itself where it is
                for layer in cache.layers:
                    layer.cumulative_length.fill_(context - 1)
            started = time.perf_counter()
            with torch.inference_mode():
                for i in range(steps):
                    place = torch.full((batch, 1), context - 1 + i, device=self._device)
                    out = step(token, past_key_values=cache, use_cache=True, position_ids=place)
                    token.copy_(out.logits[:, -1:].argmax(-1))
                token.cpu()
            elapsed = time.perf_counter() - started
            if not self._compiled:
                cache.crop(-steps)
            return elapsed / steps

        return seconds

    def prefill(self, batch: int, tokens: int) -> Timed | None:
        if self._compiled:
            return None
        torch = self._torch
        ids = torch.randint(0, self._config.vocab_size, (batch, tokens), device=self._device)

        def seconds() -> float:
            started = time.perf_counter()
            with torch.inference_mode():
                out = self._model.model(ids, use_cache=True)
                out.last_hidden_state[0, -1, 0].item()
            return time.perf_counter() - started

        return seconds


class LlamaCpp:
    """llama.cpp through the `llama-bench` on the path, which knows no batches."""

    def __init__(self, name: str, file: Path) -> None:
        self.name = name
        self._file = file

    def decode(self, batch: int, context: int, steps: int) -> Timed | None:
        if batch > 1 or context > 2048:
            return None
        return lambda: self._run("-p", "0", "-n", str(steps), "-d", str(context)) / steps

    def prefill(self, batch: int, tokens: int) -> Timed | None:
        if batch > 1:
            return None
        return lambda: self._run("-p", str(tokens), "-n", "0")

    def _run(self, *options: str) -> float:
        """Seconds of one test, which is warmed up by itself."""
        command = ["llama-bench", "-m", str(self._file), "-r", "1", "-o", "json"]
        command += ["-t", str(os.cpu_count()), *options]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return json.loads(out)[-1]["avg_ns"] / 1e9


class GptFast:
    """A checkout of gpt-fast: its model, compiled as its own `generate.py` does."""

    def __init__(self, config: ModelConfig, weights: str, checkout: Path) -> None:
        import torch
        import torch._inductor.config

        self.name = "gpt-fast"
        self._torch = torch
        self._device = "cuda" if _cuda() else "cpu"
        self._vocab = config.vocab_size
        model = _module(checkout, "model")
        scaling = config.rope_scaling
        arguments = model.ModelArgs(
            block_size=32768,
            vocab_size=config.vocab_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_local_heads=config.num_kv_heads,
            dim=config.width,
            intermediate_size=config.mlp_width,
            rope_base=config.rope_theta,
            norm_eps=config.norm_eps,
            rope_scaling=scaling
            and {
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            },
        )
        torch.set_default_dtype(getattr(torch, weights))
        with torch.device(self._device):
            self._model = model.Transformer(arguments).eval()
        torch.set_default_dtype(torch.float32)

    def decode(self, batch: int, context: int, steps: int) -> Timed | None:
        torch = self._torch
        torch._dynamo.reset()
        torch._inductor.config.coordinate_descent_tuning = True
        self._model.max_seq_length = self._model.max_batch_size = -1
        with torch.device(self._device):
            self._model.setup_caches(batch, context + steps)
        token = torch.zeros((batch, 1), dtype=torch.int, device=self._device)

        def one(token: Any, place: Any) -> Any:
            logits = self._model(token, place)[:, -1]
            probs = torch.softmax(logits, dim=-1)
            noise = torch.empty_like(probs).exponential_(1)
            return torch.argmax(probs / noise, dim=-1, keepdim=True).to(torch.int)

        step = torch.compile(one, mode="reduce-overhead", fullgraph=True)

        def seconds() -> float:
            started = time.perf_counter()
            with torch.inference_mode():
                for i in range(steps):
                    place = torch.tensor([context - 1 + i], device=self._device)
                    token.copy_(step(token, place))
                token.cpu()
            return (time.perf_counter() - started) / steps

        return seconds

    def prefill(self, batch: int, tokens: int) -> Timed | None:
        return None


class Entropix:
    """A checkout of xjdr-alt/entropix as of its last single-device version (cceeb84), as its own
    loop runs it: nothing is compiled as a whole."""

    def __init__(self, config: ModelConfig, checkout: Path) -> None:
        import jax
        import jax.numpy as jnp

        self.name = "xjdr-alt/entropix"
        sys.path.insert(0, str(checkout))
        names = ("model", "sampler", "weights", "config", "kvcache")
        parts: list[Any] = [importlib.import_module(f"entropix.{name}") for name in names]
        model, self._sampler, weights, shapes, caches = parts
        self._forward, self._cache = model.xfmr, caches.KVCache
        self._shape = shapes.LLAMA_1B_PARAMS
        width, mlp, kv = config.width, config.mlp_width, config.num_kv_heads * config.head_dim
        keys = iter(jax.random.split(jax.random.key(0), 7 * config.num_layers + 1))

        def matrix(rows: int, columns: int) -> Any:
            return 0.02 * jax.random.normal(next(keys), (rows, columns), jnp.float32)

        ones = jnp.ones(width, jnp.float32)
        layers = [
            weights.LayerWeights(
                wq=matrix(width, width),
                wk=matrix(kv, width),
                wv=matrix(kv, width),
                wo=matrix(width, width),
                w1=matrix(mlp, width),
                w2=matrix(width, mlp),
                w3=matrix(mlp, width),
                ffn_norm=ones,
                attention_norm=ones,
            )
            for _ in range(config.num_layers)
        ]
        embedding = matrix(config.vocab_size, width)
        self._weights = weights.XfmrWeights(embedding, ones, embedding, layers)

    def decode(self, batch: int, context: int, steps: int) -> Timed | None:
        import jax.numpy as jnp

        shape = self._shape
        if batch > 1 or context + steps > shape.max_seq_len:
            return None
        cache = self._cache.new(
            shape.n_layers, 1, shape.max_seq_len, shape.n_local_kv_heads, shape.head_dim
        )
        settings = self._sampler.SamplerConfig()
        turns = jnp.ones((1, shape.head_dim // 2), jnp.complex64)

        def seconds() -> float:
            token, text = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32)
            number = min(steps, 2)
            started = time.perf_counter()
            for i in range(number):
                logits, _, scores, _ = self._forward(
                    self._weights, shape, token, context - 1 + i, turns, cache
                )
                token = self._sampler.sample(text, logits, scores, cfg=settings)
            np.asarray(token)
            return (time.perf_counter() - started) / number

        return seconds

    def prefill(self, batch: int, tokens: int) -> Timed | None:
        return None


def _has_transformers() -> bool:
    return all(importlib.util.find_spec(name) for name in ("transformers", "torch"))


def _config_at(source: Path) -> Any:
    """A folder's or GGUF file's configuration, as `transformers` reads it."""
    from transformers import AutoConfig

    if source.is_file():
        return AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    return AutoConfig.from_pretrained(source)


def _cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _module(folder: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"peer_{name}", folder / f"{name}.py")
    if spec is None or spec.loader is None:
        sys.exit(f"{folder}: no {name}.py: not a checkout")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _random_gguf(config: ModelConfig, scratch: Path) -> Path:
    """A model file for llama.cpp, written once: bfloat16 matrices, float32 norms, no vocabulary's
    texts."""
    import ml_dtypes

    gguf: Any = importlib.import_module("gguf")
    path = scratch / "random.gguf"
    if path.exists():
        return path
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    rng = np.random.default_rng(0)
    width, mlp = config.width, config.mlp_width
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            return
        values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        raw = values.astype(ml_dtypes.bfloat16).view(np.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    add("token_embd.weight", config.vocab_size, width)
    add("output_norm.weight", width)
    for i in range(config.num_layers):
        add(f"blk.{i}.attn_norm.weight", width)
        add(f"blk.{i}.attn_q.weight", queries, width)
        add(f"blk.{i}.attn_k.weight", keys, width)
        add(f"blk.{i}.attn_v.weight", keys, width)
        add(f"blk.{i}.attn_output.weight", width, queries)
        add(f"blk.{i}.ffn_norm.weight", width)
        add(f"blk.{i}.ffn_gate.weight", mlp, width)
        add(f"blk.{i}.ffn_up.weight", mlp, width)
        add(f"blk.{i}.ffn_down.weight", width, mlp)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.sync()  # else the disk is busy with it while the clock runs
    return path

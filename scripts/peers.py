"""Other engines at the same shape and precision, as far as they are installed.

Weights are random, except those of a GGUF file in llama.cpp. A context is filled with random keys
and values where the engine allows it, which costs what true ones would; llama.cpp reads a prompt
instead, outside the clock.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import gguf
import ml_dtypes
import numpy as np
from llama_1b import transformers_config
from timing import Timed

from entropix_jax.errors import UserError
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.precision import INT8


class Peer(Protocol):
    """Times one step, or one prompt; None where the engine cannot run it."""

    name: str

    def decode(self, batch: int, context: int, steps: int) -> Timed | None: ...

    def prefill(self, tokens: int) -> Timed | None: ...


def find_peers(
    config: ModelConfig, weights: str, source: Path | None, scratch: Path
) -> Iterator[Peer]:
    """The installed engines that can run a model.

    Args:
        weights: the type of the weights, which llama.cpp takes from the file instead.
        source: a folder or GGUF file; None for random weights of `config`.
        scratch: where a file with random weights for llama.cpp is kept.
    """
    if weights != INT8 and all(map(importlib.util.find_spec, ("transformers", "torch"))):
        from transformers import AutoConfig, LlamaConfig

        if source is None:
            shape = LlamaConfig(**transformers_config(config))
        elif source.is_file():
            shape = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
        else:
            shape = AutoConfig.from_pretrained(source)
        yield Transformers(shape, weights)
        if _device() == "cuda":
            yield Transformers(shape, weights, compiled=True)
    if shutil.which("llama-bench"):
        if source is not None and source.is_file():
            yield LlamaCpp(f"llama.cpp, {source.stem.rpartition('.')[2]}", source)
        elif source is None and weights == "bfloat16":
            yield LlamaCpp("llama.cpp", _random_gguf(config, scratch))


def require_transformers() -> None:
    """Checks that the extra `parity` is installed.

    Raises:
        UserError: it is not.
    """
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is missing: pip install -e '.[parity]'") from None


class Transformers:
    """`transformers` on torch: a plain loop over a dynamic cache, or compiled with a static one."""

    def __init__(self, config: Any, weights: str, *, compiled: bool = False) -> None:
        """`config` is a configuration of `transformers`."""
        import torch
        from transformers import AutoModelForCausalLM

        self.name = "transformers, compiled" if compiled else "transformers"
        self._torch, self._compiled, self._config = torch, compiled, config
        torch.set_num_threads(os.cpu_count() or 1)
        self._options = {"dtype": getattr(torch, weights), "device": _device()}
        with torch.device(_device()):
            model = AutoModelForCausalLM.from_config(config, dtype=self._options["dtype"])
        self._model = model.eval()

    def decode(self, batch: int, context: int, steps: int) -> Timed | None:
        from transformers import DynamicCache, StaticCache

        torch, config = self._torch, self._config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (batch, config.num_key_value_heads, context - 1, size)
        token = torch.zeros((batch, 1), dtype=torch.long, device=_device())
        step = self._model
        if self._compiled:
            torch._dynamo.reset()  # a second shape would make sizes dynamic
            step = torch.compile(step, mode="reduce-overhead", dynamic=False)
            cache: Any = StaticCache(config=config, max_cache_len=context + steps)
        else:
            cache = DynamicCache(config=config)
        with torch.inference_mode():
            for layer in range(config.num_hidden_layers):
                cache.update(*(torch.randn(shape, **self._options) for _ in range(2)), layer)

        def seconds() -> float:
            if self._compiled:  # a static cache counts its tokens itself
                for layer in cache.layers:
                    layer.cumulative_length.fill_(context - 1)
            started = time.perf_counter()
            with torch.inference_mode():
                for i in range(steps):
                    place = torch.full((batch, 1), context - 1 + i, device=_device())
                    out = step(token, past_key_values=cache, use_cache=True, position_ids=place)
                    token.copy_(out.logits[:, -1:].argmax(-1))
                token.cpu()
            elapsed = time.perf_counter() - started
            if not self._compiled:
                cache.crop(-steps)
            return elapsed / steps

        return seconds

    def prefill(self, tokens: int) -> Timed | None:
        if self._compiled:
            return None
        torch = self._torch
        ids = torch.randint(0, self._config.vocab_size, (1, tokens), device=_device())

        def seconds() -> float:
            started = time.perf_counter()
            with torch.inference_mode():
                out = self._model.model(ids, use_cache=True)
                out.last_hidden_state[0, -1, 0].item()
            return time.perf_counter() - started

        return seconds


class LlamaCpp:
    """llama.cpp by its `llama-bench` on the path, and `llama-batched-bench` for batches."""

    def __init__(self, name: str, file: Path) -> None:
        self.name = name
        self._file = file

    def decode(self, batch: int, context: int, steps: int) -> Timed | None:
        if context > 2048 or (batch > 1 and not shutil.which("llama-batched-bench")):
            return None
        if batch == 1:
            return lambda: self._run("-p", "0", "-n", str(steps), "-d", str(context)) / steps
        options = {"-npp": context, "-ntg": steps, "-npl": batch, "-c": batch * (context + steps)}
        command = [str(word) for option in options.items() for word in option]
        command = ["llama-batched-bench", *command, "--output-format", "jsonl"]
        return lambda: self._figures(command)["t_tg"] / steps

    def prefill(self, tokens: int) -> Timed | None:
        return lambda: self._run("-p", str(tokens), "-n", "0")

    def _run(self, *options: str) -> float:
        """Seconds of one test, which warms up by itself."""
        return self._figures(["llama-bench", "-r", "1", "-o", "jsonl", *options])["avg_ns"] / 1e9

    def _figures(self, command: list[str]) -> dict[str, Any]:
        """The last line of JSON that a command on the model prints.

        Raises:
            UserError: there is none.
        """
        command = [*command, "-m", str(self._file), "-t", str(os.cpu_count())]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if not lines:
            raise UserError(f"no figures came from: {' '.join(command)}")
        figures: dict[str, Any] = json.loads(lines[-1])
        return figures


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _random_gguf(config: ModelConfig, scratch: Path) -> Path:
    """A Llama for llama.cpp, written once: bfloat16 matrices, float32 norms, no vocabulary."""
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
    width, mlp = config.width, config.mlp_width
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, width),
        "output_norm.weight": (width,),
    }
    layer: dict[str, tuple[int, ...]] = {
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
    for i in range(config.num_layers):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        raw = values.astype(ml_dtypes.bfloat16).view(np.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.sync()  # else the disk is busy with it while the clock runs
    return path

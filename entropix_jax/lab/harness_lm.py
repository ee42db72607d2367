"""This package's models and samplers as a model of the lm-evaluation-harness.

Importing this module registers it as `entropix_jax`:

    import lm_eval
    import entropix_jax.lab.harness_lm

    lm_eval.simple_evaluate(
        model="entropix_jax", model_args="sampler=entropix,batch_size=auto", tasks=["gsm8k"]
    )
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from entropix_jax.engine.api import Generation
from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request
from entropix_jax.engine.shapes import MIN_CAPACITY, bucket
from entropix_jax.errors import UserError, nearest
from entropix_jax.host.arguments import check_integer
from entropix_jax.host.cluster import Cluster
from entropix_jax.lab.likelihood import log_likelihoods
from entropix_jax.lab.spread import TextsCopy
from entropix_jax.model.loading import load
from entropix_jax.model.precision import WEIGHTS
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.version import __version__

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise UserError(
        f"the lm-evaluation-harness is missing: pip install 'entropix-jax[harness]' ({error})"
    ) from None

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

_LOG = logging.getLogger(__name__)
_AUTO_BATCH = 32  # texts whose log-likelihoods are computed in parallel
_ARGUMENTS = (
    *("pretrained", "sampler", "sampler.KEY", "seed", "dtype", "batch_size"),
    *("max_length", "max_gen_toks"),
)
# Generation settings of tasks that are used. The others concern sampling.
_USED = {"until", "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"}


@register_model("entropix_jax")
class EntropixLM(TemplateLM):  # type: ignore[misc] # the harness has no types
    """A model with a sampler.

    The sampler draws the tokens. A task's `temperature`, `do_sample` and similar arguments are
    ignored and logged. A request's random numbers depend on the seed and its context, so its text
    depends neither on the order of requests nor on the batch. Log-likelihoods are the model's,
    without a sampler.

    `ray` is the address of a cluster that generates the texts, see `Cluster`; None: here.
    """

    ray: str | None = None

    def __init__(
        self,
        pretrained: str | None = None,
        sampler: str = "entropix",
        seed: int = 0,
        dtype: str | None = None,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        """Loads the model.

        Args:
            pretrained: a model, see `load`.
            sampler: a preset's name, or a file that ends in .toml.
            dtype: dtype of the weights in memory; None or "auto" is the checkpoint's.
            batch_size: rows in parallel, or "auto": as many as fit into memory, at most 64.
            max_length: size of the context window in tokens (default: the model's positions).
            max_gen_toks: maximum number of new tokens for tasks without their own.
            max_batch_size, device: unused. The harness's command always passes them.
            settings: `sampler.KEY` changes a setting of the sampler.

        Raises:
            UserError: an unknown argument, one that does not fit the model, or an error of `load`
                or `load_sampler`.
        """
        super().__init__()
        changes = {}
        for name, value in settings.items():
            if not name.startswith("sampler."):
                raise UserError(f"no model argument '{name}'{nearest(name, _ARGUMENTS)}")
            changes[name.removeprefix("sampler.")] = value
        dtype = None if dtype == "auto" else dtype
        if dtype is not None and dtype not in WEIGHTS:
            raise UserError(f"dtype must be {', '.join(WEIGHTS)} or auto, not {dtype!r}")
        auto = str(batch_size).partition(":")[0] == "auto"
        self._slots = None if auto else _parse_integer("batch_size", batch_size)
        self.max_gen_toks = _parse_integer("max_gen_toks", max_gen_toks)
        self._seed = _parse_integer("seed", seed, -math.inf, None)
        chosen = load_sampler(str(sampler)).with_values(changes)
        where = None if pretrained is None else str(pretrained)
        self._copy = partial(TextsCopy, where, dtype, str(sampler), changes)
        self.model = load(where, dtype)
        positions = self.model.config.max_positions
        self.max_length = _parse_integer("max_length", max_length or positions, 2)
        if self.max_length > positions:
            raise UserError(f"max_length {max_length}: the model has {positions} positions")
        self.tokenizer = self.model.tokenizer
        self.sampler = calibrate_sampler(chosen, self.model)
        self._logged: set[str] = set()
        for note in self.sampler.notes:
            self._warn(note)

    @property
    def eot_token_id(self) -> int:
        """The first token that ends a text."""
        ends = self.model.eos_ids
        if not ends:
            raise UserError(f"{self.model.folder}: the model has no end token")
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text: its beginning-of-text token, else an end token."""
        bos = self.model.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Identifies the chat template in the harness's cache of requests."""
        return str(self.model.folder.resolve()).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns token ids, after a beginning-of-text token if the model has one, the text does
        not begin with it, and `add_special_tokens` is not False."""
        return self.model.tokenizer.encode(string, add_bos=add_special_tokens is not False)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the text of a conversation. Without `add_generation_prompt` it ends within the
        last message, so that the model continues it.

        Raises:
            UserError: the model has no chat template, or the template rejects the messages.
        """
        if self.model.tokenizer.chat_template is None:
            raise UserError(
                f"{self.model.folder}: no chat template: leave --apply_chat_template out"
            )
        if not add_generation_prompt:
            return self.model.tokenizer.render_begun(chat_history)
        return self.model.tokenizer.render_chat(chat_history)

    def get_model_info(self) -> dict[str, Any]:
        """Returns the description of the model in result files, besides its arguments."""
        return {
            "entropix_jax_version": __version__,
            "model_folder": str(self.model.folder),
            "model_dtype": str(self.model.precision.weights),
            "sampler": self.sampler.name,
            "sampler_values": dict(self.sampler.values),
            "sampler_seed": self._seed,
        }

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Scores requests: their texts, and the token ids of context and continuation."""
        found: list[tuple[float, bool]] = [(math.nan, False)] * len(requests)
        pairs = []
        for texts, before, after in requests:
            # A token of both texts may end in the continuation, which then has none of its own.
            own = after or self.model.tokenizer.encode_within(texts[1] if texts else "")
            pairs.append((before or [self.prefix_token_id], own))
        cut = sum(len(before) + len(after) > self.max_length + 1 for before, after in pairs)
        self._warn_of_cut(cut, len(pairs))
        batch = self._slots or _AUTO_BATCH
        likelihoods = log_likelihoods(self.model, pairs, context=self.max_length, batch=batch)
        with _bar("loglikelihood", len(pairs), disable_tqdm) as bar:
            for index, score, is_greedy in likelihoods:
                found[index] = score, is_greedy
                if (text := requests[index][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", text, found[index])
                bar.update()
        return found

    def loglikelihood_rolling(
        self, requests: list["Instance"], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-probabilities of whole texts, in nats. A text longer than the context
        window is scored in disjoint windows, each after as many tokens as fit."""
        prefix, windows, owners = self.prefix_token_id, [], []
        for index, instance in enumerate(requests):
            tokens = self.tok_encode(instance.args[0], add_special_tokens=False)
            if tokens[:1] == [prefix]:
                del tokens[0]  # the windows begin with it
            for window in get_rolling_token_windows(tokens, prefix, self.max_length, 1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        for index, (score, _) in zip(owners, scores, strict=True):
            totals[index] += score
        for instance, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", instance.args, total)
        return totals

    def generate_until(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[str]:
        """Returns the texts after the contexts, each up to its first stop string, an end token or
        the end of a chat's turn."""
        if not requests:
            return []
        jobs = self._requests(requests)
        # The longest first: what does not fit into memory fails at once.
        jobs.sort(key=lambda job: len(job.prompt), reverse=True)
        texts = [""] * len(requests)

        def finish(job: Request, text: str, error: str | None) -> None:
            if error is not None:
                raise UserError(f"request {job.tag}: {error}")
            texts[job.tag] = text
            self.cache_hook.add_partial("generate_until", requests[job.tag].args, text)
            bar.update()

        with _bar("generate_until", len(jobs), disable_tqdm) as bar:
            self._generate(jobs, finish)
        return texts

    def _generate(
        self, jobs: Sequence[Request], finish: Callable[[Request, str, str | None], None]
    ) -> None:
        """Runs requests, and passes each with its text, and its error or None, to `finish`."""
        capacity = bucket(max(len(job.prompt) + job.max_new_tokens for job in jobs), MIN_CAPACITY)
        if self.ray is not None:
            copy = self._copy(self._slots or _AUTO_BATCH, capacity)
            with Cluster(copy, address=self.ray) as cluster:
                plain = (replace(job, sampler=cast(Any, None)) for job in jobs)
                cluster.run(
                    plain,
                    lambda job, found: finish(job, *found),
                    lambda job, why: finish(job, "", why),
                    len(jobs),
                )
            return
        engine = None
        if self._slots is not None:
            slots = min(self._slots, bucket(len(jobs), 1))
            engine = Engine(self.model, slots=slots, capacity=capacity)
        for event in Generation(self.model, jobs, engine=engine):
            if event.row.finish_reason is not None:
                finish(event.row.request, event.row.text, event.row.error)

    def _requests(self, instances: list["Instance"]) -> list[Request]:
        """The engine's requests, tagged with the index of their instances."""
        unused: dict[str, None] = {}
        times: Counter[str] = Counter()
        cut, requests = 0, []
        for index, instance in enumerate(instances):
            context, settings = instance.args
            unused |= {f"{name}={settings[name]}": None for name in settings if name not in _USED}
            known = normalize_gen_kwargs(settings, self.max_gen_toks)
            budget = _parse_integer("max_gen_toks", known["max_gen_toks"])
            room = self.max_length - budget
            if room < 1:
                raise UserError(
                    f"max_gen_toks {budget}: the model sees {self.max_length} tokens at once, "
                    "which leaves no room for a prompt"
                )
            tokens = self.tok_encode(context) or [self.prefix_token_id]
            cut += len(tokens) > room
            request = Request(
                tokens[-room:],
                self.sampler,
                max_new_tokens=budget,
                # Copies of a context, of `repeats`, get different random numbers.
                row_id=f"{times[context]}:{context}",
                seed=self._seed,
                eos_ids=self.model.turn_end_ids,
                stop=[stop for stop in known["until"] if stop],
                tag=index,
            )
            requests.append(request)
            times[context] += 1
        self._warn_of_cut(cut, len(requests))
        if unused:
            self._warn(f"not used: {', '.join(unused)}: sampler '{self.sampler.name}' draws")
        return requests

    def _warn_of_cut(self, cut: int, number: int) -> None:
        if cut:
            self._warn(
                f"{cut} of {number} requests do not fit into the {self.max_length} tokens that the "
                "model sees at once: their first tokens are left out"
            )

    def _warn(self, message: str) -> None:
        """Logs each message once."""
        if message not in self._logged:
            self._logged.add(message)
            _LOG.warning(message)


def _parse_integer(name: str, value: Any, least: float = 1, most: int | None = 2**31 - 1) -> int:
    """Parses a model argument, which may be text."""
    is_text = isinstance(value, str) and re.fullmatch("-?[0-9]{1,100}", value)
    return check_integer(name, int(value) if is_text else value, least, most)


def _bar(what: str, number: int, hidden: bool) -> Any:
    return tqdm(total=number, desc=f"Running {what} requests", disable=hidden)

"""This package's models and samplers as a model of the lm-evaluation-harness.

Importing this module registers it as `entropix_jax`:

    import lm_eval
    import entropix_jax.lab.harness_lm

    lm_eval.simple_evaluate(
        model="entropix_jax", model_args="sampler=entropix,batch_size=auto", tasks=["gsm8k"]
    )
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from entropix_jax.engine.engine import Engine
from entropix_jax.engine.memory import most_slots
from entropix_jax.engine.preparation import (
    MIN_CAPACITY,
    CalibratedSampler,
    bucket,
    calibrate_sampler,
)
from entropix_jax.engine.results import Request
from entropix_jax.errors import UserError, check_range, nearest
from entropix_jax.lab.likelihood import log_likelihoods
from entropix_jax.model.loading import load
from entropix_jax.model.precision import WEIGHTS
from entropix_jax.names import REGIMES
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
_AUTO_SLOTS = 32
_ARGUMENTS = (
    *("pretrained", "sampler", "sampler.KEY", "seed", "dtype", "batch_size", "max_batch_size"),
    *("max_length", "max_gen_toks"),
)
# What a task may set of its generation; the others say how to sample, which the sampler does.
_USED = {"until", "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"}


@register_model("entropix_jax")
class EntropixLM(TemplateLM):  # type: ignore[misc] # the harness has no types
    """A model with a sampler, as the harness runs it.

    Generation goes by the sampler, whatever a task says of `temperature`, `do_sample` and the like;
    the log names what is not used. Requests are rows of a batch that goes on without a pause: one
    that has ended makes room for the next. A request's random numbers come from the seed and its
    own context, so neither the order nor the batch changes its text.

    Log-likelihoods are the model's own: no sampler plays a part.
    """

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
            pretrained: what `load` takes for a model.
            sampler: a preset's name, or a file that ends in .toml.
            seed: of all random numbers.
            dtype: "float32", "bfloat16" or "int8", the type of the weights in memory; None or
                "auto" is the checkpoint's own.
            batch_size: rows side by side. "auto" (or "auto:N") is 32, or fewer where the device's
                memory has less room.
            max_batch_size: what "auto" starts from in place of 32.
            max_length: most tokens that the model sees at once; None is all its positions.
            max_gen_toks: tokens to generate at most where a task does not say.
            device: plays no part: JAX chooses the device, and JAX_PLATFORMS in the environment says
                which. The harness's command always names one.
            settings: `sampler.KEY` changes a setting of the sampler.

        Raises:
            UserError: an argument that is unknown or does not fit the model, or what `load` and
                `load_sampler` refuse.
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
        self.max_gen_toks = _whole("max_gen_toks", max_gen_toks, 1)
        self._most = _AUTO_SLOTS
        if max_batch_size is not None:
            self._most = _whole("max_batch_size", max_batch_size, 1)
        self._slots = None if auto else _whole("batch_size", batch_size, 1)
        self._seed = _whole("seed", seed, None)
        chosen = load_sampler(str(sampler)).with_values(changes)
        self.model = load(None if pretrained is None else str(pretrained), dtype)
        positions = self.model.config.max_positions
        self.max_length = positions
        if max_length is not None:
            self.max_length = _whole("max_length", max_length, 2)
        if self.max_length > positions:
            raise UserError(f"max_length {max_length}: the model has {positions} positions")
        self.tokenizer = self.model.tokenizer
        self.sampler = calibrate_sampler(chosen, self.model)
        self._logged: set[str] = set()
        for note in self.sampler.notes:
            self._warn(note)

    # What TemplateLM asks for.

    @property
    def eot_token_id(self) -> int:
        """The first token that ends a text."""
        ends = self.model.generation.eos_ids
        if not ends:
            raise UserError(f"{self.model.folder}: no end token is named")
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before the first token of a text: its beginning, or else an end token."""
        bos = self.model.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Names the cache of requests that were put as chats."""
        return str(self.model.folder.resolve()).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids, after the beginning-of-text token where the model's texts have one. It is not
        put twice, nor with `add_special_tokens` False."""
        return self.model.tokenizer.encode(string, add_bos=add_special_tokens is not False)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation. Without `add_generation_prompt` it ends within the last
        message, for the model to go on with it.

        Raises:
            UserError: the model has no chat template, or it refuses the messages.
        """
        if self.model.tokenizer.chat_template is None:
            raise UserError(
                f"{self.model.folder}: no chat template: leave --apply_chat_template out"
            )
        if not add_generation_prompt:
            return self.model.tokenizer.render_begun(chat_history)
        return self.model.tokenizer.render_chat(chat_history)

    def get_model_info(self) -> dict[str, Any]:
        """What a file of results says of the model besides its arguments."""
        return {
            "entropix_jax_version": __version__,
            "model_folder": str(self.model.folder),
            "model_dtype": str(self.model.precision.weights),
            "sampler": self.sampler.name,
            "sampler_values": dict(self.sampler.values),
            "sampler_seed": self._seed,
        }

    # What the harness asks.

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """For each request its text, and the token ids of context and continuation."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        pairs = [(before or [self.prefix_token_id], after) for _, before, after in requests]
        cut = sum(len(before) + len(after) > self.max_length + 1 for before, after in pairs)
        self._warn_of_cut(cut, len(pairs))
        likelihoods = log_likelihoods(
            self.model, pairs, context=self.max_length, batch=self._slots or self._most
        )
        with _bar("loglikelihood", len(pairs), disable_tqdm) as bar:
            for one in likelihoods:
                answer = found[one.pair] = one.log_likelihood, one.is_greedy
                text = requests[one.pair][0]
                if text is not None:
                    self.cache_hook.add_partial("loglikelihood", text, answer)
                bar.update()
        return found

    def loglikelihood_rolling(
        self, requests: list["Instance"], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of whole texts, in nats: of each token once, the first one after the
        beginning of a text. A text that is longer than the model sees at once is read in windows
        that end with it.
        """
        prefix, windows, owners = self.prefix_token_id, [], []
        for number, instance in enumerate(requests):
            tokens = self.tok_encode(instance.args[0], add_special_tokens=False)
            if tokens[:1] == [prefix]:
                del tokens[0]  # a text that says so itself
            for window in get_rolling_token_windows(tokens, prefix, self.max_length, 1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        answers = self._loglikelihood_tokens(windows, disable_tqdm)
        for number, (score, _) in zip(owners, answers, strict=True):
            totals[number] += score
        for instance, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", instance.args, total)
        return totals

    def generate_until(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[str]:
        """What the sampler writes after each context, up to the first stop string, an end token or
        the end of a chat's turn."""
        if not requests:
            return []
        jobs = self._requests(requests)
        texts = [""] * len(requests)
        longest = max(len(job.prompt) + job.max_new_tokens for job in jobs)
        capacity = bucket(longest, MIN_CAPACITY)
        slots = min(self._slots or self._auto_slots(capacity), bucket(len(jobs), 1))
        engine = Engine(self.model, slots=slots, capacity=capacity)
        # The longest first: what does not fit into memory fails at once.
        jobs.sort(key=lambda job: len(job.prompt), reverse=True)
        with _bar("generate_until", len(jobs), disable_tqdm) as bar:
            for event in engine.run(jobs):
                row, number = event.row, event.row.request.tag
                if row.finish_reason is None:
                    continue
                if row.error is not None:
                    raise UserError(f"request {number}: {row.error}")
                texts[number] = row.text
                self.cache_hook.add_partial("generate_until", requests[number].args, row.text)
                bar.update()
        return texts

    def _requests(self, instances: list["Instance"]) -> list[Request]:
        """The engine's requests, tagged with the index of their instances."""
        unused: dict[str, None] = {}
        times: Counter[str] = Counter()
        cut = 0
        requests = []
        for number, instance in enumerate(instances):
            context, settings = instance.args
            unused |= dict.fromkeys(self._unused(settings))
            wanted = normalize_gen_kwargs(settings, self.max_gen_toks)
            budget = _whole("max_gen_toks", wanted["max_gen_toks"], 1)
            room = self.max_length - budget
            if room < 1:
                raise UserError(
                    f"max_gen_toks {budget}: the model sees {self.max_length} tokens at once, "
                    "which leaves no room for a prompt"
                )
            tokens = self.tok_encode(context) or [self.prefix_token_id]
            cut += len(tokens) > room
            stops = [stop for stop in wanted["until"] if stop]
            requests.append(
                Request(
                    tokens[-room:],
                    self.sampler,
                    max_new_tokens=budget,
                    # A context that is asked for again, by `repeats`, gets other random numbers.
                    row_id=f"{times[context]}:{context}",
                    seed=self._seed,
                    # No answer goes on after the end of a turn.
                    eos_ids=self.model.turn_end_ids,
                    stop=stops,
                    tag=number,
                )
            )
            times[context] += 1
        self._warn_of_cut(cut, len(requests))
        if unused:
            self._warn(
                f"not used: {', '.join(unused)}; sampler '{self.sampler.name}' draws the tokens "
                "(model argument sampler)"
            )
        return requests

    def _unused(self, settings: Mapping[str, Any]) -> Iterable[str]:
        """A task's settings that have no effect."""
        greedy = {"do_sample": False, "temperature": 0.0} if _is_greedy(self.sampler) else {}
        for name, value in settings.items():
            if name not in _USED and not (name in greedy and value == greedy[name]):
                yield f"{name}={value}"

    def _auto_slots(self, capacity: int) -> int:
        """Rows that the device has room for, and one if it has room for none."""
        config, precision = self.model.config, self.model.precision
        return max(most_slots(config, precision, slots=self._most, capacity=capacity, mesh=None), 1)

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


def _is_greedy(sampler: CalibratedSampler) -> bool:
    """Whether the likeliest token is all that the sampler ever takes."""
    return all(sampler.values[f"arms.{regime}"] == "argmax" for regime in REGIMES)


def _whole(name: str, value: Any, least: int | None) -> int:
    """A model argument that is a whole number."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):  # the last of an infinity
        number = None
    if number is None or not (isinstance(value, str) or number == value):
        raise UserError(f"{name} must be a whole number, not {value!r}")
    if least is not None:
        check_range(name, number, least, 2**31 - 1)
    return number


def _bar(what: str, number: int, hidden: bool) -> Any:
    return tqdm(total=number, desc=f"Running {what} requests", disable=hidden)

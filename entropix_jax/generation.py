"""Generation as a user calls it: prompts in, a stream of tokens and at the end the results out.

The host only hands out work and reads what came back. While it reads one chunk of steps, the device
already runs the next.
"""

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.decode import (
    FINISHED_EOS,
    FINISHED_ERROR,
    FINISHED_LENGTH,
    FINISHED_STOP,
    RUNNING,
    DecodeState,
    Recording,
    StepRecord,
    decode,
    init_state,
    prefill,
)
from entropix_jax.errors import UserError
from entropix_jax.loading import LanguageModel, logits_epsilon
from entropix_jax.results import Event, Piece, Request, Row
from entropix_jax.sampler.arms import ACTIONS
from entropix_jax.sampler.keys import row_key
from entropix_jax.sampler.params import REGIMES, SamplerParams
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import Sampler
from entropix_jax.stopping import StopFilter
from entropix_jax.trace import TokenRecord, plain

MAX_STEPS = 32  # most steps between two looks of the host
_LOOK_SECONDS = 0.1  # how often the host would like to look, for a stream that flows
_MAX_EOS = 8
_MIN_WINDOW = 128
_MIN_CAPACITY = 256
_MIN_PREFILL, _MAX_PREFILL = 16, 512
_SCORES_BYTES = 1 << 28  # most memory for one layer's attention scores in a prefill call

_FINISH = {FINISHED_EOS: "eos", FINISHED_LENGTH: "length", FINISHED_ERROR: "error"}


class Generation:
    """A run over some rows. Iterate to make it go; `rows` then holds the results.

    Leaving the iteration early, or `stop`, leaves the rows as far as they came; `interrupt` then
    ends them.
    """

    def __init__(
        self,
        model: LanguageModel,
        requests: Sequence[Request],
        sampler: Sampler | str = "entropix",
        *,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        turn_end: bool = False,
        recording: Recording | None = None,
    ) -> None:
        """Checks everything that can be checked before anything is computed.

        Args:
            stop: a text that ends a row, or several.
            ignore_eos: no token ends a row.
            turn_end: the end of a chat's turn ends a row too, whether or not the model's folder
                says so.
            recording: what each token's record holds besides the usual.

        Raises:
            UserError: no request, an empty prompt, one that leaves no room for a token or holds
                what is no token, or a sampler or recording that does not fit the model.
        """
        if not requests:
            raise UserError("there is nothing to generate: no request")
        if isinstance(sampler, str):
            sampler = load_sampler(sampler)
        self.model = model
        self.sampler = sampler.calibrated(model.folder)
        self.seed = seed
        self.rows = [Row(request) for request in requests]
        self.timings: dict[str, float] = {}
        self._recording = recording or Recording()
        if not 0 <= self._recording.top <= model.config.vocab_size:
            raise UserError(
                f"the {self._recording.top} likeliest tokens are asked for, "
                f"the model has {model.config.vocab_size}"
            )
        stops = [stop] if isinstance(stop, str) else stop
        self._budgets = [_budget(model, request) for request in requests]
        self._stops = [StopFilter[TokenRecord](stops) for _ in requests]
        self._streams = [model.tokenizer.stream(after=request.prompt) for request in requests]
        self._params = _stack(_sampler_params(model, self.sampler), len(requests))
        ends = model.turn_end_ids if turn_end else model.generation.eos_ids
        self._eos_ids = _padded_ids(() if ignore_eos else ends)
        self._steps = 1
        self._asked_to_stop = False
        self._start = time.perf_counter()
        self._iterator = self._iterate()

    def __iter__(self) -> Iterator[Event]:
        """The events, token by token: all rows of one step, then the next step. A second iteration
        goes on where the first was left."""
        return self._iterator

    def _iterate(self) -> Iterator[Event]:
        self._start = time.perf_counter()
        for records in _one_ahead(self._chunks()):
            asked = time.perf_counter()
            records = jax.device_get(records)
            self._pace(time.perf_counter() - asked)
            for event in self._events(records):
                if event.token is not None:
                    self.timings.setdefault("first_token", time.perf_counter() - self._start)
                yield event
                if self._asked_to_stop:
                    return
        self.timings["total"] = time.perf_counter() - self._start

    def stop(self) -> None:
        """Asks the run to end after the event that is on its way. A signal handler may call it."""
        self._asked_to_stop = True

    def interrupt(self) -> list[Event]:
        """Ends the rows that had not ended, and gives the text that was still held back of them."""
        running = [i for i, row in enumerate(self.rows) if row.finish_reason is None]
        self.timings.setdefault("total", time.perf_counter() - self._start)
        return [self._end(index, "interrupt") for index in running]

    def run(self) -> list[Row]:
        """Runs to the end and gives the rows."""
        for _ in self:
            pass
        return self.rows

    def _chunks(self) -> Iterator[StepRecord]:
        """Hands out chunks of steps while a row runs; their records may not be there yet."""
        state = self._prefilled()
        prompts = np.array([len(row.request.prompt) for row in self.rows])
        budgets = np.array(self._budgets)
        done = 0
        while done < budgets.max() and self._running():
            steps = min(self._steps, int(budgets.max()) - done)
            running = np.array([row.finish_reason is None for row in self.rows])
            lengths = (prompts + np.minimum(done + steps, budgets))[running]
            state, records = decode(
                self.model.params,
                self._params,
                self._eos_ids,
                self._host_stops(state),
                jnp.int32(steps),
                config=self.model.config,
                window=min(_bucket(int(lengths.max()), _MIN_WINDOW), state.cache.capacity),
                max_steps=MAX_STEPS,
                recording=self._recording,
            )
            done += steps
            yield records

    def _prefilled(self) -> DecodeState:
        """All prompts cached but for their last tokens; one that all rows share is run once."""
        requests = [row.request for row in self.rows]
        keys = np.stack([row_key(self.seed, request.row_id) for request in requests])
        shared = all(list(r.prompt) == list(requests[0].prompt) for r in requests)
        prompts = [request.prompt for request in requests[: 1 if shared else None]]
        longest = max(
            len(r.prompt) + budget for r, budget in zip(requests, self._budgets, strict=True)
        )
        state = init_state(
            self.model.config,
            prompts,
            self._budgets[: len(prompts)],
            keys[: len(prompts)],
            capacity=_bucket(longest, _MIN_CAPACITY),
            dtype=self.model.precision.activations,
        )
        counts = np.array([len(prompt) - 1 for prompt in prompts])
        done = 0
        while done < counts.max() and not self._asked_to_stop:
            left = int(counts.max()) - done
            size = min(_bucket(left, _MIN_PREFILL), self._prefill_size(done + left, len(prompts)))
            tokens = np.zeros((len(prompts), size), np.int32)
            count = np.clip(counts - done, 0, size)
            for row, prompt in enumerate(prompts):
                tokens[row, : count[row]] = prompt[done : done + count[row]]
            state = prefill(
                self.model.params,
                state,
                jnp.asarray(tokens),
                jnp.asarray(count, jnp.int32),
                config=self.model.config,
                window=min(_bucket(done + size, _MIN_WINDOW), state.cache.capacity),
            )
            done += size
            # Part by part: handed out all at once, they could not be stopped.
            jax.block_until_ready(state.cache.length)
        if shared and len(requests) > 1:
            state = jax.tree.map(lambda x: jnp.repeat(x, len(requests), axis=0), state)
            budgets = jnp.asarray(self._budgets, jnp.int32)
            state = replace(state, keys=jnp.asarray(keys), budget=budgets)
        return state

    def _events(self, records: StepRecord) -> Iterator[Event]:
        for step in range(records.live.shape[0]):
            for index in np.flatnonzero(records.live[step]):
                if self.rows[index].finish_reason is None:
                    record = jax.tree.map(lambda x: x[step, index], records)  # noqa: B023
                    yield from self._commit(int(index), record)

    def _commit(self, index: int, record: StepRecord) -> Iterator[Event]:
        """Adds one token to its row, and ends the row where it ends."""
        row, stop = self.rows[index], self._stops[index]
        if record.finish == FINISHED_ERROR:
            row.error = f"row {index}: NaN or infinite logits at position {record.position}"
            yield self._end(index, "error")
            return
        token = self._token_record(index, record)
        row.tokens.append(token)
        pieces = tuple(Piece(text, source) for text, source in stop.push(token.text, token))
        row.text += "".join(piece.text for piece in pieces)
        reason = "stop" if stop.stopped else _FINISH.get(int(record.finish))
        if reason == "length" and self._budgets[index] < row.request.max_new_tokens:
            reason = "context"
        if reason is not None:
            pieces += self._end(index, reason).pieces
        yield Event(index, token, pieces)

    def _end(self, index: int, reason: str) -> Event:
        """Ends a row, and gives the text that had been held back."""
        row = self.rows[index]
        row.finish_reason = reason
        pieces = tuple(Piece(text, source) for text, source in self._stops[index].flush())
        row.text += "".join(piece.text for piece in pieces)
        return Event(index, None, pieces)

    def _token_record(self, index: int, record: StepRecord) -> TokenRecord:
        choice, tokenizer = record.choice, self.model.tokenizer
        token_id = int(choice.token)
        text = self._streams[index].push(token_id)
        if record.finish != RUNNING:
            text += self._streams[index].flush()
        metrics = {name: plain(value) for name, value in vars(choice.metrics).items()}
        proposal = choice.proposal
        top = layers = None
        if self._recording.top:
            top = [
                (int(i), tokenizer.decode([int(i)], skip_special=False), plain(p))
                for i, p in zip(record.top_ids, record.top_probs, strict=True)
            ]
        if self._recording.layers:
            layers = plain(record.layers)
        return TokenRecord(
            row=index,
            position=int(record.position),
            token_id=token_id,
            text=text,
            regime=REGIMES[choice.regime],
            action=ACTIONS[proposal.action],
            logprob=plain(choice.logprob),
            sequence_varentropy=plain(choice.sequence_varentropy),
            confidence=plain(proposal.confidence),
            temperature=plain(proposal.temperature),
            top_k=int(proposal.top_k),
            top_p=plain(proposal.top_p),
            min_p=plain(proposal.min_p),
            forwards=int(record.forwards),
            loop=bool(choice.looping),
            top=top,
            layers=layers,
            **metrics,
        )

    def _prefill_size(self, length: int, batch: int) -> int:
        """Tokens of a prefill call: fewer in long contexts and large batches, whose attention
        scores take room."""
        scores = _bucket(length, _MIN_WINDOW) * batch * self.model.config.num_heads
        room = 1 << max(_SCORES_BYTES // (4 * scores), 1).bit_length() - 1
        return min(_MAX_PREFILL, max(_MIN_PREFILL, room))

    def _running(self) -> bool:
        return not self._asked_to_stop and any(row.finish_reason is None for row in self.rows)

    def _host_stops(self, state: DecodeState) -> DecodeState:
        """Tells the device which rows a stop string has ended."""
        stopped = np.array([row.finish_reason == "stop" for row in self.rows])
        if not stopped.any():
            return state
        running = state.finish == RUNNING
        return replace(state, finish=jnp.where(stopped & running, FINISHED_STOP, state.finish))

    def _pace(self, waited: float) -> None:
        """More steps a chunk while chunks come fast: a first token at once, then a steady flow."""
        if waited < _LOOK_SECONDS / 2:
            self._steps = min(2 * self._steps, MAX_STEPS)
        elif waited > _LOOK_SECONDS:
            self._steps = max(self._steps // 2, 1)


def generate(
    model: LanguageModel,
    prompt: str | Sequence[Mapping[str, str]],
    sampler: Sampler | str = "entropix",
    *,
    max_new_tokens: int = 256,
    samples: int = 1,
    seed: int = 0,
    chat: bool | None = None,
    system: str | None = None,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    recording: Recording | None = None,
) -> list[Row]:
    """Generates texts from one prompt and gives them when all have ended.

    Args:
        prompt: a text, or a conversation: messages with a `role` and a `content` each.
        sampler: a preset's name, a file that ends in .toml, or a sampler.
        samples: rows, whose random numbers differ.
        chat: put a text as a turn of a chat; None is the model's own way.
        system: a system message, which makes sense in a chat only.
        stop: a text, or several, that end a row and are not part of it.
        ignore_eos: no token ends a row.
        recording: what each token's record holds besides the usual.

    Raises:
        UserError: an input that cannot be used; an error within a row is that row's `error`.
    """
    if samples < 1:
        raise UserError(f"samples must be at least 1, not {samples}")
    if chat is None:
        chat = model.is_chat_model or not isinstance(prompt, str)
    tokens = encode_prompt(model, prompt, chat=chat, system=system)
    generation = Generation(
        model,
        [Request(tokens, str(i), max_new_tokens) for i in range(samples)],
        sampler,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        turn_end=chat,
        recording=recording,
    )
    for note in generation.sampler.notes:
        warnings.warn(note, stacklevel=2)
    return generation.run()


def encode_prompt(
    model: LanguageModel,
    prompt: str | Sequence[Mapping[str, str]],
    *,
    chat: bool,
    system: str | None = None,
) -> list[int]:
    """A prompt as token ids.

    Args:
        prompt: a text, or a conversation: messages with a `role` and a `content` each.
        chat: put a text as one turn of a chat, not as plain text.
        system: a system message, which makes sense in a chat only.

    Raises:
        UserError: an empty prompt, a chat without a chat template, or a chat where none is wanted.
    """
    if not prompt:
        raise UserError("the prompt is empty")
    if not chat and (system is not None or not isinstance(prompt, str)):
        what = "a system message" if isinstance(prompt, str) else "a conversation"
        raise UserError(f"{what} needs a chat (--chat)")
    if not chat:
        return model.tokenizer.encode(str(prompt), add_bos=True)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return model.tokenizer.apply_chat(messages)


def _budget(model: LanguageModel, request: Request) -> int:
    """The tokens that a row may generate: as many as asked for, within the model's positions."""
    prompt, positions = len(request.prompt), model.config.max_positions
    if prompt == 0:
        raise UserError("the prompt is empty")
    if strange := [i for i in request.prompt if not 0 <= i < model.config.vocab_size]:
        raise UserError(f"the prompt holds {strange[0]}, which is no token")
    if request.max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
    if prompt >= positions:
        raise UserError(
            f"the prompt has {prompt} tokens, the model {positions} positions: "
            f"at most {positions - 1} leave room for an answer"
        )
    return min(request.max_new_tokens, positions - prompt)


def _sampler_params(model: LanguageModel, sampler: Sampler) -> SamplerParams:
    bans = [i for i in sampler.values["draw.bans"] if i >= model.config.vocab_size]
    if bans:
        raise UserError(f"sampler '{sampler.name}': draw.bans holds {bans[0]}, which is no token")
    return sampler.params(
        num_layers=model.config.num_layers,
        epsilon=logits_epsilon(model),
        encode=lambda text: model.tokenizer.encode(text, add_bos=False),
    )


def _stack(params: SamplerParams, rows: int) -> SamplerParams:
    """The same parameters for each row."""
    stacked = jax.tree.map(lambda x: np.broadcast_to(x, (rows, *np.shape(x))), params)
    return jax.device_put(stacked)


def _padded_ids(ids: Sequence[int]) -> jax.Array:
    """End tokens as int32 [_MAX_EOS], so that their number compiles nothing; -1 matches none."""
    if len(ids) > _MAX_EOS:
        raise UserError(f"the model names {len(ids)} end tokens, at most {_MAX_EOS} are possible")
    return jax.device_put(np.array([*ids, *[-1] * (_MAX_EOS - len(ids))], np.int32))


def _one_ahead(chunks: Iterator[StepRecord]) -> Iterator[StepRecord]:
    """Each chunk, once the next has been handed out: the device works while the host reads."""
    waiting: StepRecord | None = None
    for chunk in chunks:
        if waiting is not None:
            yield waiting
        waiting = chunk
    if waiting is not None:
        yield waiting


def _bucket(length: int, smallest: int) -> int:
    """The next power of two, so that few shapes are ever compiled."""
    return max(smallest, 1 << (length - 1).bit_length())

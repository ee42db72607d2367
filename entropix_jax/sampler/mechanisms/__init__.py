"""The mechanisms that come with the package.

The list determines the arms of `arms.<regime>`, the rules of `truncation.rule`, the sections of a
sampler file, the actions of a trace, and each row's state. Its order is the order of the action
counts in results, and the order in which filters run.
"""

from entropix_jax.sampler.mechanisms.backspace import BACKSPACE
from entropix_jax.sampler.mechanisms.branch import BRANCH
from entropix_jax.sampler.mechanisms.clarify import CLARIFY, QUESTION
from entropix_jax.sampler.mechanisms.inject import INJECT
from entropix_jax.sampler.mechanisms.lookup import LOOKUP
from entropix_jax.sampler.mechanisms.phrases import PHRASES
from entropix_jax.sampler.mechanisms.plain import (
    ADAPTIVE,
    ARGMAX,
    DYNATEMP,
    EDT,
    EXPLORE,
    FORKING,
    RESAMPLE,
    SAMPLE,
)
from entropix_jax.sampler.mechanisms.repetition import DRY, NO_REPEAT_NGRAM, REPETITION
from entropix_jax.sampler.mechanisms.reweigh import ADAPTIVE_P, XTC
from entropix_jax.sampler.mechanisms.rules import RULES
from entropix_jax.sampler.mechanisms.stopping import BUDGET_FORCING, CONFIDENCE, THINK_END
from entropix_jax.sampler.mechanisms.surrogate import SURROGATE
from entropix_jax.sampler.mechanisms.view import VIEW
from entropix_jax.sampler.mechanisms.wrong import WRONG

_ARMS = ARGMAX, INJECT, LOOKUP, EXPLORE, BRANCH, CLARIFY, RESAMPLE, BACKSPACE, ADAPTIVE, SAMPLE
_DRAWS = EDT, DYNATEMP, FORKING  # arms whose action is `sample`
_OBSERVERS = VIEW, SURROGATE
_FILTERS = *RULES, REPETITION, NO_REPEAT_NGRAM, DRY, XTC, ADAPTIVE_P

_STOPS = THINK_END, BUDGET_FORCING
_OTHERS = *_OBSERVERS, *_STOPS, *_FILTERS, PHRASES, QUESTION, CONFIDENCE, WRONG

MECHANISMS = *_ARMS, *_DRAWS, *_OTHERS

# Mechanisms that a user's own arm may act by.
ACTING = frozenset({QUESTION.name} | {m.name for m in MECHANISMS if m.may is not None})

# The actions in a trace.
ACTIONS = tuple(m.name for m in (*_ARMS, THINK_END, BUDGET_FORCING, PHRASES))

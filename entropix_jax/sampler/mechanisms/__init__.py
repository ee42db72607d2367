"""The mechanisms that come with the package, one page each.

Everything else follows from the list: the arms that `arms.<regime>` may name, the rules of
`truncation.rule`, the sections of a sampler's file, the actions of a trace, and each row's state.
The order is that of the actions in a result's counts, and that in which transforms are applied.
"""

from entropix_jax.sampler.mechanisms.adaptive import ADAPTIVE
from entropix_jax.sampler.mechanisms.adaptive_p import ADAPTIVE_P
from entropix_jax.sampler.mechanisms.backspace import BACKSPACE
from entropix_jax.sampler.mechanisms.branch import BRANCH
from entropix_jax.sampler.mechanisms.confidence import CONFIDENCE
from entropix_jax.sampler.mechanisms.dry import DRY
from entropix_jax.sampler.mechanisms.inject import INJECT
from entropix_jax.sampler.mechanisms.mirostat import MIROSTAT
from entropix_jax.sampler.mechanisms.phrases import PHRASES
from entropix_jax.sampler.mechanisms.plain import (
    ARGMAX,
    DYNATEMP,
    EDT,
    EXPLORE,
    FORKING,
    RESAMPLE,
    SAMPLE,
)
from entropix_jax.sampler.mechanisms.prefixes import PREFIXES
from entropix_jax.sampler.mechanisms.repetition import NO_REPEAT_NGRAM, REPETITION
from entropix_jax.sampler.mechanisms.rules import RULES
from entropix_jax.sampler.mechanisms.thinking import BUDGET_FORCING, THINK_END
from entropix_jax.sampler.mechanisms.xtc import XTC

_ARMS_ONLY = EDT, DYNATEMP, FORKING  # their action is `sample`

MECHANISMS = (
    ARGMAX,
    INJECT,
    EXPLORE,
    BRANCH,
    RESAMPLE,
    BACKSPACE,
    ADAPTIVE,
    SAMPLE,
    *_ARMS_ONLY,
    THINK_END,
    BUDGET_FORCING,
    *RULES,
    *PREFIXES,
    MIROSTAT,
    REPETITION,
    NO_REPEAT_NGRAM,
    DRY,
    XTC,
    ADAPTIVE_P,
    PHRASES,
    CONFIDENCE,
)

# The actions in a trace.
ACTIONS = tuple(m.name for m in MECHANISMS if (m.propose or m.replaces) and m not in _ARMS_ONLY)

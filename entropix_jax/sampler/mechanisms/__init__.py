"""The mechanisms that come with the package, one page each.

Everything else follows from the list: the arms that `arms.<regime>` may name, the sections of a
sampler's file, the actions of a trace, and each row's state. The order is that of the actions in a
result's counts.
"""

from entropix_jax.sampler.mechanisms.adaptive import ADAPTIVE
from entropix_jax.sampler.mechanisms.backspace import BACKSPACE
from entropix_jax.sampler.mechanisms.branch import BRANCH
from entropix_jax.sampler.mechanisms.inject import INJECT
from entropix_jax.sampler.mechanisms.plain import ARGMAX, EDT, EXPLORE, RESAMPLE, SAMPLE

MECHANISMS = (
    ARGMAX,
    INJECT,
    EXPLORE,
    BRANCH,
    RESAMPLE,
    BACKSPACE,
    ADAPTIVE,
    SAMPLE,
    EDT,
)

# The actions in a trace. `edt` is an arm only: its action is `sample`.
ACTIONS = tuple(mechanism.name for mechanism in MECHANISMS if mechanism != EDT)

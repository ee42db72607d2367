"""`python -m entropix_jax.report`, the same as `entropix-jax report`."""

from entropix_jax.__main__ import run_module

run_module("report")

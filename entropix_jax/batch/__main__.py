"""`python -m entropix_jax.batch`, the same as `entropix-jax batch`."""

from entropix_jax.__main__ import run_module

run_module("batch")

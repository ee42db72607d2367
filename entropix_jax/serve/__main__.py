"""`python -m entropix_jax.serve`, the same as `entropix-jax serve`."""

from entropix_jax.__main__ import run_module

run_module("serve")

"""`python -m entropix_jax.chat`, the same as `entropix-jax chat`."""

from entropix_jax.__main__ import run_module

run_module("chat")

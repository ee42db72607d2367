"""`python -m entropix_jax.harness`: the lm-evaluation-harness's command."""

from entropix_jax.__main__ import run_module

if __name__ == "__main__":
    run_module("harness")

"""`python -m entropix_jax.evaluate`: samplers against each other, tuned equally."""

from entropix_jax.__main__ import run_module

if __name__ == "__main__":
    run_module("evaluate")

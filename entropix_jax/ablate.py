"""`python -m entropix_jax.ablate`: many settings of a sampler on tasks."""

from entropix_jax.__main__ import run_module

if __name__ == "__main__":
    run_module("ablate")

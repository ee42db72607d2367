"""`python -m entropix_jax.batch`: a file of prompts in, a file of completions out."""

from entropix_jax.__main__ import run_module

if __name__ == "__main__":
    run_module("batch")

"""Llama inference in pure JAX with a sampler that reacts to the model's uncertainty."""

__version__ = "0.1.0"

"""Llama and its close kin: configuration, weights, forward pass. Knows nothing of sampling."""

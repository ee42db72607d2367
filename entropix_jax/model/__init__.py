"""Llama and close relatives: configuration, weights, forward pass. Independent of sampling."""

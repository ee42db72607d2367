"""Calibration: the four bounds of a sampler's regimes, fitted to the tokens of a text.

Throughout, `points` are tokens in the entropy/varentropy plane: float [n, 2], bits and bits^2.
"""

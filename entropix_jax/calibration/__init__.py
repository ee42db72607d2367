"""Calibration: fits the four thresholds of a sampler's regimes to the tokens of a text.

Throughout, `points` are tokens as pairs of entropy and varentropy: float [n, 2], bits and bits^2.
"""

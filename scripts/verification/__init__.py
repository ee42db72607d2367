"""The parts of `scripts/verify.py`: what is tried, each with its count and what failed."""

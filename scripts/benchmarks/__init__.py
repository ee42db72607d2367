"""What `scripts/benchmark.py` measures, a file for each side of it."""

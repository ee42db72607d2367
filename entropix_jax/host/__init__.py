"""Files, signals, memory and caches of the host machine."""

"""A small probabilistic world whose texts have known next-token distributions."""

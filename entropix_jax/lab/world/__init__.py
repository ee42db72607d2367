"""A small probabilistic grammar whose texts have known next-token distributions."""

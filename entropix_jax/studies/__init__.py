"""Studies: many settings of a sampler on the same items, and what may be concluded from them."""

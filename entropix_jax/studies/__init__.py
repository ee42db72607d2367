"""Studies: sampler settings compared on the same items, with confidence intervals."""

"""The sampler: from logits and attention statistics to each row's next token. Needs no model."""

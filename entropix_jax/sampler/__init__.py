"""The sampler: from logits and attention statistics to each row's next token. Knows no model."""

"""The training of the embedded model: its tokenizer, its text, and the truth to compare with."""

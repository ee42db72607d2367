"""What the embedded model is made with: its tokenizer, its text, and the truth to compare with."""

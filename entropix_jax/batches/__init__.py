"""What a batch reads and writes: its input records, and its output, which grows and is resumed."""

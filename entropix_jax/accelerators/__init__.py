"""Code for one kind of accelerator. The model has a plain form of each."""

"""``zinf train``: fine-tunes a causal language model on text files."""

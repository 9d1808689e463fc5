"""Effects: acts on what `zinf_core.policy` returns and chooses nothing itself."""

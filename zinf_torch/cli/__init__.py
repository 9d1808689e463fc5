"""Subcommands that zinf_torch brings to the ``zinf`` command line."""

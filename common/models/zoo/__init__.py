"""The architectures by name."""

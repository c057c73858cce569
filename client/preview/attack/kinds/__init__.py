"""The kinds of attack."""

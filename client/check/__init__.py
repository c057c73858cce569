"""``flwr-client check``: what would go wrong on the first day, found before it does, each with what to do about it."""

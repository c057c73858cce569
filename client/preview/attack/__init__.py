"""``flwr-client preview --attack``: the hospital attacks itself as a malicious coordinator could."""

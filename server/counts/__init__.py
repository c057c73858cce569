"""``flwr-server count`` and ``flwr-sim count``: ask for counts, pool the answers, show them."""

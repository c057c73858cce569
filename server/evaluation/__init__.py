"""``flwr-server evaluate``: send models to hospitals, pool the figures that they answer."""

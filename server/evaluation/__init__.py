"""``flwr-server evaluate``: send models to hospitals, which score them on their test images, and pool the figures."""

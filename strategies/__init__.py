"""Federated learning methods, each with a coordinator's half and a hospital's half, and the engine that runs them."""

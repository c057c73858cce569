"""Comparison of the federated model with one that the hospital trains alone."""

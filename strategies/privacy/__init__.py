"""Differential privacy and secure aggregation: the maths, without messages."""

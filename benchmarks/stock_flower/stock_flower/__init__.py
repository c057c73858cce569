"""Flower's quickstart without its training."""

"""Metrics of a classifier, computed from labels and scores."""

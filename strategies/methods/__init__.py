"""The baselines and comparators of the papers."""

"""Comparison of runs: statistics, and what each site gains."""

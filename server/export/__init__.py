"""A run's model as a file for other programs, and predictions from it."""

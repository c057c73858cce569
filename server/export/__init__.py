"""Use of a run's model outside the run: evaluation, predictions, and export to other programs."""

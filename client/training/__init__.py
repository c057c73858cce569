"""A round at the hospital: training, evaluation, privacy budget, secure aggregation."""

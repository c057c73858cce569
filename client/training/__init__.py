"""The hospital's part of a round: training, evaluation, privacy budget and secure aggregation."""

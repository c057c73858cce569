"""The researcher's program ``flwr-sim``, and runs compared with one another: comparisons, studies, the benchmark."""

"""The researcher's program ``flwr-sim``, and several runs side by side: comparisons, studies, the benchmark."""

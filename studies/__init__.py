"""The program ``flwr-sim`` for researchers, and comparisons of runs: of methods, in studies and in the benchmark."""

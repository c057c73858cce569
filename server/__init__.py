"""The coordinator and the researcher: flwr-server, flwr-sim, run folders and reports."""

"""``flwr-client check``: finds problems of a site before its first run, each with a remedy."""

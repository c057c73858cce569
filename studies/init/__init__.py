"""``flwr-sim init``: inspect a table of labels, show what is in it, and write an experiment."""

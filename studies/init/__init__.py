"""``flwr-sim init``: inspect a label table, show its content, and write an experiment."""

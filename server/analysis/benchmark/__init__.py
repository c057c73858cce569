"""The reference benchmark: what is run, what a finished run leaves, how methods are ranked."""

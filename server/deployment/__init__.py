"""A federation over the network: processes, supervision, status."""

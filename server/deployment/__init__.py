"""A federation over the network: the SuperLink's process, supervision of runs, status."""

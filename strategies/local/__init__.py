"""Local training in a hospital's process: losses, training loop, early stopping, clipping, base of the methods."""

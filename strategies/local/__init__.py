"""Local training at a hospital: losses, training loop, early stopping, clipping, the hospital's half of a method."""

"""What a hospital trains with: losses, training loop, clipping, compression, early stopping."""

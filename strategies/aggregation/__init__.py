"""The maths of combining updates: means, robust means, server optimisers."""

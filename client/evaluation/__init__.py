"""Evaluation of existing models on a hospital's own images, at the hospital."""

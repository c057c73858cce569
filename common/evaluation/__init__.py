"""Evaluation of existing models without training, at a hospital alone or on a researcher's machine."""

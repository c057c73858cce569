"""How good a classifier is, from labels and scores."""

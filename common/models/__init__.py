"""The image classifiers that all methods train: networks, their trained values as arrays, saved models, GPUs."""

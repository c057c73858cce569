"""Training on GPUs: equal work gives equal bits, kernels start together, a batch may be split across several GPUs."""

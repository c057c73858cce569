"""FedNoRo: sites with noisy labels are found by their losses, learn from the model of all, and count less."""

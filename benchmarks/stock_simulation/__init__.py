"""Flower's quickstart on the images of the benchmark: FedAvg, a ClientApp with ``train`` and ``evaluate``."""

"""The hospital's connection to the coordinator: TLS, Flower's Fleet API, the service loop, and its status."""

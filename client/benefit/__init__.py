"""The hospital's comparison of the federated model with a model that it trains alone on its own data."""

"""Whether the hospital is better off alone: it trains a model of its own, and compares it with the federated one."""

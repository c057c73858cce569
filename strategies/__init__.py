"""The federated learning methods: the coordinator's half, the hospital's half and the messages between them."""

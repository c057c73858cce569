"""The coordinator's code: ``flwr-server``, simulation, run folders, reports and exported models."""

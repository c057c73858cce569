"""Attacks of ``flwr-client preview --attack``, by which a hospital tests what a malicious coordinator could learn."""

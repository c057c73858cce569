"""Attacks of ``flwr-client preview --attack``: the hospital tests what a malicious coordinator could find out."""

"""Fixtures that several modules share."""

from tests.server.superlinks import certificates, link, port

__all__ = ["certificates", "link", "port"]

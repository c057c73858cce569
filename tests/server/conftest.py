"""Fixtures that several modules share."""

from tests.server.superlinks import certificates, database, link, port

__all__ = ["certificates", "database", "link", "port"]

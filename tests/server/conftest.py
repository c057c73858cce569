"""Fixtures that several modules share."""

from tests.server.superlinks import certificates, coordinator, link, port

__all__ = ["certificates", "coordinator", "link", "port"]

"""Withdrawal of a hospital from its federation."""

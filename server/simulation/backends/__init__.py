"""Backends of a simulation: sites run in this process (inline) or in workers on Ray."""

"""Differential privacy at the site: noise, what it costs, and where it makes no sense."""

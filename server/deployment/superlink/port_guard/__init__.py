"""Protects the hospitals' port from strangers."""

"""Simulation: all sites on one machine or on a Ray cluster."""

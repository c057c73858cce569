"""Partition one data set over simulated sites in the ways of several papers."""

"""Partition one data set over simulated sites, as several papers do."""

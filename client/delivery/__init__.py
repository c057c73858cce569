"""Packages of finished runs that the coordinator hands out: the hospital's side."""

"""Readers for the kinds of data that an experiment or a site can name."""

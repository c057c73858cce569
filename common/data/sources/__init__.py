"""The kinds of data an experiment or a site can name."""

"""Probabilities of pictures in files, for the programs of the coordinator, the hospital and the researcher."""

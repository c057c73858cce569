"""The hospital's storage of packages with finished models that the coordinator sends."""

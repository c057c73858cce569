"""The SuperLink, which hospitals connect to, and the run that sends them messages through it.

The coordinator uses anything of Flower beyond its public API (1.39 to 1.42) only here.
"""

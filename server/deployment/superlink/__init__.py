"""Flower's SuperLink, and a run on it.

Only here does the coordinator use anything of Flower beyond its public API (1.39 to 1.42).
"""

"""Data sets in memory, their settings in a configuration file, and splits by patient."""

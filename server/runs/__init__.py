"""The run folder: its files, and how they are written, read and verified."""

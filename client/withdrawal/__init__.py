"""A hospital leaves its federation."""

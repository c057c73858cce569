"""Helpers that all our programs share: files, terminal output, signals, memory limits, hashes and text formats."""

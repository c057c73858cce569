"""Processes that run for days: how they start, end and are restarted, and what their exit codes mean."""

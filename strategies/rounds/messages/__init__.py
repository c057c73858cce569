"""Requests out, replies in: deadlines, quarantine, plausibility."""

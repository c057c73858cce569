"""The hospital's policy gate: rules for requests and replies, limits of memory and time, and the audit log."""

"""What a GPU does; skipped on a machine without one."""

"""What the SuperLink keeps: sites, runs and messages, in memory for reading and in SQLite for the next start."""

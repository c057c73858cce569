"""The SuperLink as a process on this machine: how it starts, its log, database and clock."""

"""Basic tools of every program: files, terminal, signals, memory and text."""

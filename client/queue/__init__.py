"""A hospital whose GPU is behind a queue: the batch script, and the program that submits it when work waits."""

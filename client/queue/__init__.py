"""Training in jobs of a queue: the batch script, and the program that submits it when a request waits."""

"""The run folder: what it holds, how it is written, read, verified and replayed."""

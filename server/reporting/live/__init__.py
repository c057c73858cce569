"""The live view of a run: a web page that is served by a separate process, which reads the run's files."""

"""Pages, figures and the live view of a run, for people to read."""

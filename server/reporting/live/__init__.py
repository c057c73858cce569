"""The live view of a run: a page that reads the files which a run writes anyway, in a process of its own."""

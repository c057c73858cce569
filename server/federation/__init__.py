"""One run on the coordinator, from roll call to summary."""

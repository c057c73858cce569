"""A run on the coordinator, from the roll call (the first exchange with all sites) to the summary."""

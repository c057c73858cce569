"""One method in one place, both halves: coordinator, hospital, and what they say to one another."""

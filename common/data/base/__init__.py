"""An image set in memory, and what an experiment file says of one."""

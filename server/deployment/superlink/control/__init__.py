"""The calls of the coordinator's own programs to their SuperLink, over a Unix socket: register sites, lead runs."""

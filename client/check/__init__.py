"""The command ``flwr-client check``: it finds a site's problems before the first run, and prints a remedy for each."""

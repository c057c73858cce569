"""The command ``flwr-client check``, which finds a site's problems before its first run and names a remedy for each."""

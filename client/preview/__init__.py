"""Previews for a hospital before it trains: its images as the network receives them, and a dry run of one round."""

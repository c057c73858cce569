"""Previews for a hospital before it takes part: its images as the network receives them, and a dry run of one round."""

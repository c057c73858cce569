"""The hospital: ClientApp, training loop, the site's data and memory."""

"""The coordinator's side of delivery: send the model and report of a finished run to its hospitals."""

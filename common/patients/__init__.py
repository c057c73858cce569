"""A hospital's patients: their parts of the data, who opted out, and keyed fingerprints of their names."""

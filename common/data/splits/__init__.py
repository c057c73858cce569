"""Training, validation and test parts, disjoint by patient."""

"""Load image data sets, split them by patient, and partition them over simulated sites."""

"""Use of a model at the hospital, offline: received packages, predictions, recalibration."""

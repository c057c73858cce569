"""Decode image files (PNG, JPEG, DICOM, NIfTI), cache the decoded pictures, and augment them for training."""

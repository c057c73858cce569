"""Image files to arrays: PNG, JPEG, DICOM."""

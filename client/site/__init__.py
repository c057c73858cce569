"""One hospital's settings, policy, images, files on disk, and rules for small groups of patients."""

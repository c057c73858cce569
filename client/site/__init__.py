"""The hospital itself: its settings, policy, images, what it keeps on disk and what it discloses."""

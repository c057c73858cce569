"""The hospital itself: settings, policy, images, files on its disk, and rules of disclosure."""

"""Image classifiers split into trunk and head, with the head's rows named by class."""

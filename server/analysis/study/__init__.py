"""A paper's experiments as files: run them, and set ours beside the paper's tables."""

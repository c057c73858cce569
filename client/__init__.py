"""The hospital's program: its Flower ClientApp, its training, and its data, settings and state on disk."""

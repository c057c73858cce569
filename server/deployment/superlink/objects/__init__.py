"""The objects of messages in the SuperLink: bounds, storage, service."""

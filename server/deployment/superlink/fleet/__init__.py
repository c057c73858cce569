"""The Fleet API that hospitals call: authentication and ownership of every call."""

"""What both sides of the wire must agree on: label contract, records, models, data, metrics, config schemas."""

__version__ = "0.1.0"

"""The round loop: who takes part, messages, the guard, secure aggregation."""

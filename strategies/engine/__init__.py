"""The round loop: roll call, messages to the sites, checks of replies, secure aggregation and the state of a run."""

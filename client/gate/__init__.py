"""The hospital's policy at work: rules for requests and replies, limits of cost and time, and the audit."""

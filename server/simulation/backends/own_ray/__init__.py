"""A Ray of our own on one machine that starts fast: workers are forked, and what is not used is left out."""

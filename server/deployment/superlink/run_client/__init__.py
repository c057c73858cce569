"""How a run talks to the SuperLink."""

"""Where simulated sites run: in this process, or on Ray."""

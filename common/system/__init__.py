"""Files, terminals, time, memory and text: what any program needs."""

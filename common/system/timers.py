"""Timers of both sides, all of which ``flwr-server deadlines`` names."""

HEARTBEAT_INTERVAL_S = 15
"""As told to Flower's SuperLink, which takes a site for lost after two of these without a sign of life."""
HEARTBEAT_PAUSE_S = HEARTBEAT_INTERVAL_S / 3
"""Between two signs of life, so that one or two may get lost."""
CALL_TIMEOUT_S = 120.0
"""For one call: 4 MiB, two at once, at 0.6 Mbit/s."""
CLOCKS_DIFFER_S = 300.0
"""Between site and coordinator, at most: Flower refuses a call that is signed at another time."""
TLS_TIMEOUT_S = 10.0
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 20.0
"""Pauses between tries to connect, growing from the one to the other."""
KEY_PATIENCE_S = 10.0
"""How long a site tries again after its key was refused, for an admission that is on its way."""
JOIN_DEADLINE_S = 15.0
"""How long a round's begin waits for the roll call answer of a site that has just connected."""
REFUSAL_NOTED_S = 10.0
"""How long a refused site may take to say that it knows; a run that ends before leaves it without the reason."""
ALONE_TIMES = 2.0
"""``evaluation.compare_local`` takes a site 1.25 times what the rounds took it; so many times are allowed for."""

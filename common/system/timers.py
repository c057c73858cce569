"""Timeouts of coordinator and hospital programs, in seconds; ``flwr-server deadlines`` lists them."""

HEARTBEAT_INTERVAL_S = 15
"""Interval of heartbeats; Flower's SuperLink takes a site for lost after two of them without one."""
HEARTBEAT_PAUSE_S = HEARTBEAT_INTERVAL_S / 3
"""Pause between two heartbeats, so that one or two may get lost."""
CALL_TIMEOUT_S = 120.0
"""Longest time of one call: 4 MiB, two at once, at 0.6 Mbit/s."""
CLOCKS_DIFFER_S = 300.0
"""Largest difference of the clocks of site and coordinator; Flower refuses calls signed at other times."""
TLS_TIMEOUT_S = 10.0
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 20.0
"""First and longest pause between tries to connect; pauses grow in between."""
KEY_PATIENCE_S = 10.0
"""Time for which a site tries again after its key was refused, because its admission may be on the way."""
JOIN_DEADLINE_S = 15.0
"""Time that the start of a round waits for the roll call answer of a site that has just connected."""
REFUSAL_NOTED_S = 10.0
"""Time that a run waits for a refused site to confirm; after it the site may not have the reason."""
ALONE_TIMES = 2.0
"""Factor on the time of a site's rounds that ``evaluation.compare_local`` may take; in practice it takes 1.25 times."""
HEARTBEAT_EVERY_S = 10.0
"""Interval of the heartbeats of a run to the SuperLink."""
UPLOAD_STALL_S = 120.0
"""Time without another object of an announced reply, after which the reply counts as cut off; as long as one call."""

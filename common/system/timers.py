"""Timeouts of coordinator and hospital programs, in seconds; ``flwr-server deadlines`` lists them."""

HEARTBEAT_INTERVAL_S = 15
"""Interval of a site's heartbeats; Flower's SuperLink treats a site as lost after two intervals without one."""
HEARTBEAT_PAUSE_S = HEARTBEAT_INTERVAL_S / 3
"""Pause between two heartbeats; it is shorter, so that one or two may get lost."""
CALL_TIMEOUT_S = 120.0
"""Maximum duration of one call: two parallel transfers of 4 MiB at 0.6 Mbit/s."""
MAX_CLOCK_DIFFERENCE_S = 300.0
"""Maximum difference between the clocks of site and coordinator; Flower refuses calls that are signed at other
times.
"""
TLS_TIMEOUT_S = 10.0
FIRST_RETRY_S = 1.0
"""First pause between two attempts to connect; later pauses are longer."""
MAX_RETRY_S = 20.0
"""Longest pause between two attempts to connect."""
REFUSED_KEY_RETRY_S = 10.0
"""Time for which a site tries again after its key was refused, because it may be admitted soon."""
JOIN_DEADLINE_S = 15.0
"""Time for which the start of a round waits for the roll call answer of a site that has just connected."""
REFUSAL_CONFIRMATION_S = 10.0
"""Time for which a run waits until a refused site confirms the refusal; a site that does not may lack the reason."""
LOCAL_COMPARISON_TIME_FACTOR = 2.0
"""Maximum duration of ``evaluation.compare_local``, as a multiple of a site's rounds; in practice it is 1.25."""
RUN_HEARTBEAT_INTERVAL_S = 10.0
"""Interval of the heartbeats of a run to the SuperLink."""
UPLOAD_STALL_TIMEOUT_S = 120.0
"""Time without another object of an announced reply, after which the reply counts as interrupted; as long as
one call.
"""

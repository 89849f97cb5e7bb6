"""For the tests of the core and of every plugin."""

import signal

from hypothesis import HealthCheck, settings

# a slow minute of a busy machine is no failure
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# a shell that starts the tests in the background has interrupts ignored, by them and by the runs that they start
signal.signal(signal.SIGINT, signal.default_int_handler)

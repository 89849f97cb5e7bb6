"""For the tests of the core and of every plugin."""

from hypothesis import HealthCheck, settings

# a slow minute of a busy machine is no failure
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

"""What all tests share: see runs.py."""

from hypothesis import HealthCheck, settings

pytest_plugins = ["runs"]

# How long a test takes says more about the machine than about us.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

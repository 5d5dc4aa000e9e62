"""Settings for all tests: Hypothesis without deadlines, since the machines that run it are shared."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "quick",
    deadline=None,
    max_examples=40,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[phase for phase in Phase if phase != Phase.explain],  # it traces every line: ten times slower
)
settings.register_profile("thorough", parent=settings.get_profile("quick"), max_examples=2000, stateful_step_count=80)
settings.load_profile("quick")

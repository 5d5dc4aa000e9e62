"""Explains why a run, a batch or a job took so long: pure functions of recorded times (see `explanation`)."""

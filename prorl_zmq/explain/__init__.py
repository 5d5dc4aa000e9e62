"""Explain why a run, a batch or a job took as long as it did. Pure functions of recorded times (see `explanation`)."""

"""Why a run, a batch or a job took as long as it did: pure, over recorded times (see `explanation`)."""

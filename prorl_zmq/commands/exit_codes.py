"""Exit codes of the programs, and how their errors look: one line.

0 done; 1 the service could not do it; 2 a wrong flag, file or setting; 3 an engine could not start; 130 interrupted.
"""

from __future__ import annotations

import logging

from .. import errors
from ..system.logs import say

FAILED, USAGE_ERROR, CANNOT_START, INTERRUPTED = 1, 2, 3, 130
CALLERS_FAULT = (
    errors.ConfigError,
    errors.DuplicateBackend,
    errors.DuplicateJob,
    errors.EndpointInUse,
    errors.InvalidEndpoint,
    errors.InvalidJob,
    errors.InvalidRecord,
    errors.InvalidWeights,
    errors.JobTooLarge,
    errors.MalformedMessage,
    errors.NotAllowed,
    errors.SandboxUnavailable,
    errors.UnknownBackend,
    errors.UnknownJob,
    errors.UnknownSession,
    errors.UnknownTask,
)


def complain(program: str, message: str, code: int) -> int:
    """Print a line of error; return the exit code."""
    say(program, message, logging.ERROR)
    return code


def complain_of(program: str, error: errors.ProrlError) -> int:
    """Print an error of this package; return its exit code."""
    code = CANNOT_START if error.fields.get("starting") else FAILED
    return complain(program, error.message, USAGE_ERROR if isinstance(error, CALLERS_FAULT) else code)

from __future__ import annotations

import copy
import pickle

import pytest

from prorl_zmq import errors
from prorl_zmq.errors import BY_CODE, Busy, DuplicateJob, ErrorInfo, ProrlError, from_info
from prorl_zmq.wire import codec


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=list(BY_CODE))
def test_every_error_comes_back_from_the_wire_as_its_own_class(kind: type[ProrlError]) -> None:
    error = kind("what was wrong and what to do", job_id="a", attempts=2, waited_s=1.5, final=True, place=None)
    again = from_info(codec.decode(codec.encode(error.info()), ErrorInfo))
    assert type(again) is kind
    assert str(again) == again.message == error.message
    assert again.fields == error.fields


def test_every_error_has_a_code_of_its_own_and_says_what_it_means() -> None:
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ProrlError)]
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert set(BY_CODE.values()) == set(kinds) - {ProrlError}
    assert all(kind.__doc__ for kind in kinds)


def test_fields_are_attributes() -> None:
    error = Busy("full", retry_after_s=0.5)
    assert error.retry_after_s == 0.5
    with pytest.raises(AttributeError, match="Busy has no attribute 'retry_in'"):
        _ = error.retry_in


def test_a_code_from_a_newer_version_is_still_an_error() -> None:
    error = from_info(ErrorInfo("sandbox_on_fire", "bring water", {"degrees": 451}))
    assert type(error) is ProrlError
    assert (str(error), error.degrees) == ("bring water", 451)


def test_fields_may_have_any_name() -> None:
    info = ErrorInfo("busy", "full", {"message": "another", "self": 1, "fields": 2, "code": 3})
    error = from_info(info)
    assert str(error) == error.message == "full"
    assert error.info() == info


def test_an_error_survives_copying_and_pickling() -> None:
    error = DuplicateJob("taken", job_id="a")
    for again in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is DuplicateJob
        assert (str(again), again.job_id) == ("taken", "a")

"""`VllmEngine` with a real vLLM and a tiny model: what one run of `cases.py` gave, against transformers and itself."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_python import START_LIMIT_S

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(START_LIMIT_S + 60)]

CLOSE = 1e-4
"""Most that a log-prob may differ from that of transformers, in float32."""


@pytest.fixture
def case(results: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """What the case that the test is named after gave."""
    given = results[request.node.name.removeprefix("test_")]
    if isinstance(given, dict) and "traceback" in given:
        pytest.fail(given["traceback"])
    return given


def test_description(case: Any, models: Any) -> None:
    assert case == {
        "model": str(models[0]),
        "chat": ["transformers", str(models[0])],
        "numbers": [2048, 1024],
        "max_in_flight": case["max_in_flight"],
        "mode": "processed_logprobs",
        "version": 0,
    }
    assert case["max_in_flight"] > 1


def test_exactness(case: Any) -> None:
    assert len(case) == 12
    for one in case:
        assert one["dtypes"] == ["int32", "float32"]
        assert one["spans"] == [[0, 0, 40]]
        assert one["reason"] == "length"
        assert one["error"] < CLOSE


def test_scores(case: Any) -> None:
    assert len(case["errors"]) == 16
    assert max(case["errors"]) < CLOSE
    assert [one["fields"].get("refused") for one in case["refused"]] == [True] * 3
    assert "0 to 64" in case["refused"][0]["message"]


def test_kv_figures(case: Any) -> None:
    running, idle = case["running"], case["idle"]
    assert running["capacity_tokens"] > 2048
    assert 0 < running["used"] < 1
    assert idle["capacity_tokens"] == running["capacity_tokens"]
    assert idle["used"] == 0, "a cached prompt that no request uses is not in use"
    assert (idle["waiting"], idle["preempted"]) == (0, 0)
    assert case["cached"] >= 512
    assert case["abstract"] == ["__init__", "log_engine_initialized", "record"]


def test_seeds(case: Any) -> None:
    first, same, other = case
    assert first == same
    assert first != other


def test_stop_ids(case: Any) -> None:
    free, stopped, stop = case["free"]["ids"], case["stopped"], case["stop"]
    assert len(free) == 24
    assert stopped["ids"] == free[: free.index(stop) + 1]
    assert stopped["reason"] == "stop"


def test_own_end(case: Any) -> None:
    """The ids that the model itself ends at end no turn, unless they are asked for."""
    assert set(case["ends"]) & set(case["free"]["ids"][:-1])
    assert len(case["free"]["ids"]) == 24
    assert case["free"]["reason"] == "length"
    assert case["stopped"]["reason"] == "stop"


def test_stop_texts(case: Any) -> None:
    free, done, stop = case["free"]["ids"], case["done"], case["stop"]
    assert done["ids"] == free[: len(done["ids"])]
    assert len(done["ids"]) < len(free)
    assert done["reason"] == "stop"
    assert stop in case["text"]
    assert stop not in case["shorter"]


def test_limits(case: Any) -> None:
    assert len(case["one"]["ids"]) == 1
    assert case["one"]["reason"] == "length"
    assert len(case["full"]["ids"]) == 8
    assert case["full"]["reason"] == "length"


def test_refused(case: Any) -> None:
    words = [
        "empty",
        "outside of 0 to 1023",
        "outside of 0 to 1023",
        "leaves no room in a context of 2048",
        "stop token",
    ]
    assert [one["type"] for one in case] == ["EngineFailed"] * len(words)
    for one, expected in zip(case, words, strict=True):
        assert expected in one["message"]


def test_cancelled(case: Any) -> None:
    assert case == {"busy": True, "idle": True, "unfinished": 0}


def test_bad_weights(case: Any, models: Any) -> None:
    missing, other = case["refusals"]
    assert missing["type"] == other["type"] == "InvalidWeights"
    assert missing["fields"] == {"path": str(models[0] / "nowhere")}
    assert "no *.safetensors" in other["message"]
    assert case["same"]
    assert case["version"] == 0


def test_keep(case: Any) -> None:
    spanning, fresh = case["spanning"], case["fresh"]
    (old, start, swap), (new, begin, end) = spanning["spans"]
    assert (old, start, new, begin, end) == (0, 0, 3, swap, 300)
    assert swap >= 20
    assert spanning["error"] < CLOSE
    assert spanning["reason"] == "length"
    assert case["version"] == 3
    assert fresh["spans"] == [[3, 0, 2]]
    assert fresh["error"] < CLOSE
    cold, warm, swapped = case["cached"]
    assert (cold, swapped) == (0, 0)
    assert warm > 0


def test_drain(case: Any) -> None:
    running, waiting = case["running"], case["waiting"]
    assert running["spans"] == [[3, 0, 200]]
    assert running["reason"] == "length"
    assert waiting["spans"] == [[4, 0, 4]]
    assert max(running["error"], waiting["error"]) < CLOSE


def test_abort(case: Any) -> None:
    aborted, rest = case["aborted"], case["rest"]
    ((version, start, end),) = aborted["spans"]
    assert (version, start) == (4, 0)
    assert 5 <= end == len(aborted["ids"]) < 1000
    assert aborted["reason"] == "abort"
    assert rest["spans"] == [[5, 0, 4]]
    assert max(aborted["error"], rest["error"]) < CLOSE


def test_order(case: Any) -> None:
    """Updates follow one another as they were asked for, also where one's caller has left."""
    assert case["left"]
    assert case["version"] == 8
    assert case["done"]["spans"] == [[8, 0, 4]]
    assert case["done"]["error"] < CLOSE


def test_halves(case: Any) -> None:
    """Between begin and end nothing is generated, and each token is of the weights that its version names."""
    for mode in ("keep", "drain", "abort"):
        assert case[mode]["paused"]
    keep, drain, abort = (case[mode]["first"] for mode in ("keep", "drain", "abort"))
    (old, _, swap), (new, begin, end) = keep["spans"]
    assert (old, new, begin, end) == (8, 9, swap, 200)
    assert swap >= 20
    assert case["keep"]["running"]
    assert drain["spans"] == [[9, 0, 200]]
    ((version, _, end),) = abort["spans"]
    assert (version, abort["reason"]) == (10, "abort")
    assert 20 <= end < 200
    assert [case[mode]["next"]["spans"] for mode in ("keep", "drain", "abort")] == [[[v, 0, 4]] for v in (9, 10, 11)]
    assert [case[mode]["version"] for mode in ("keep", "drain", "abort")] == [9, 10, 11]
    assert case["cancelled"]["first"]["spans"] == [[11, 0, 200]]
    assert case["bad"]["type"] == "InvalidWeights"
    assert case["after"]["spans"] == [[11, 0, 4]]
    judged = [case[mode][which] for mode in ("keep", "drain", "abort") for which in ("first", "next")]
    assert max(one["error"] for one in (*judged, case["cancelled"]["first"], case["after"])) < CLOSE


def test_patched(case: Any) -> None:
    """vLLM reads a copy that is changed in place at each load, and not again afterwards."""
    assert [one["spans"] for one in case["done"]] == [[[20, 0, 8]], [[21, 0, 8]], [[22, 0, 8]]]
    assert max(one["error"] for one in case["done"]) < CLOSE
    assert case["done"][0]["ids"] == case["done"][2]["ids"] != case["done"][1]["ids"]
    assert case["version"] == 22


def test_lost(case: Any) -> None:
    """A reload that fails in its middle is the engine's end; nobody gets tokens of whatever weights there are then."""
    for one in case.values():
        assert one["type"] == "EngineFailed"
        assert one["fields"]["fatal"] is True
        assert "nowhere" in one["message"]


def test_close(case: Any, results: dict[str, Any]) -> None:
    assert case["children"] >= 2
    assert case["left"] == []
    assert "Exception ignored" not in results["log"]
    assert "output_handler failed" not in results["log"]
    assert case["health"]["type"] == "EngineFailed"

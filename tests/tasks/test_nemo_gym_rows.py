"""Rows of NeMo Gym become instances as they are; what the policy could not be shown is refused by name."""

import json

import pytest

from prorl_zmq.errors import InvalidRecord
from prorl_zmq.tasks.loading import load_jobs

COUNTER = {
    "responses_create_params": {
        "input": [{"content": "add 1 then add 2 then get the count", "role": "user"}],
        "tools": [
            {
                "name": "increment_counter",
                "parameters": {"type": "object", "properties": {"count": {"type": "integer", "description": ""}}},
                "strict": True,
                "type": "function",
                "description": "",
            }
        ],
    },
    "expected_count": 6,
    "initial_count": 3,
}
REASONING = {
    "responses_create_params": {"input": [{"role": "user", "content": "Is Zoey a sage?"}]},
    "question": "Is Zoey a sage?",
    "answer": "No.",
    "metadata": {"source_dataset": "knights_knaves"},
}
QUESTION = {
    "responses_create_params": {"input": "What is 1 + 1?", "instructions": "Be brief."},
    "problem": "What is 1 + 1?",
    "expected_answer": "2",
    "agent_ref": {"type": "responses_api_agents", "name": "math_agent"},
}
"""Rows as the servers of `nemo-gym` ship them; columns of two would also fit formats of mathematics."""


def _jobs(tmp_path, *rows, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(load_jobs(path, **options))


def test_rows_are_kept_whole(tmp_path):
    jobs = _jobs(tmp_path, COUNTER, REASONING, QUESTION)
    assert {job.task for job in jobs} == {"environment"}
    assert [job.instance["args"]["row"] for job in jobs] == [COUNTER, REASONING, QUESTION]
    assert {job.instance["environment"] for job in jobs} == {"nemo-gym"}


def test_options_name_another_environment(tmp_path):
    (job,) = _jobs(tmp_path, COUNTER, options={"environment": "my-gym", "seed": 7})
    assert (job.instance["environment"], job.instance["seed"]) == ("my-gym", 7)


def _with(**params):
    return {"responses_create_params": {"input": "Hello.", **params}}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (_with(input=[{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]), "'function_call'"),
        (_with(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "…"}]}]), "'input_image'"),
        (_with(input=[{"role": "critic", "content": "No."}]), "role 'critic'"),
        (_with(input=[{"role": "user", "content": None}]), "type None"),
        (_with(input=[3]), "type None"),
        (_with(input=[]), "input must be"),
        (_with(input=3), "input must be"),
        (_with(tools=[{"type": "web_search"}]), "'web_search'"),
        (_with(tools=["web"]), "'web'"),
        ({"responses_create_params": [1]}, "must be a map"),
    ],
)
def test_what_cannot_be_shown_is_named(tmp_path, row, named):
    with pytest.raises(InvalidRecord, match=named) as caught:
        _jobs(tmp_path, row)
    assert caught.value.fields["field"] == "responses_create_params"
    assert "line 1" in caught.value.message

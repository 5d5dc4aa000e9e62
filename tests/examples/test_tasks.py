from __future__ import annotations

from itertools import islice

from prorl_zmq.demo.tasks import QUESTIONS
from prorl_zmq.examples.train_torch.tasks import MATH_QUESTIONS, SHAPES, PromptStream, held_out_jobs

KINDS = 2 * len(QUESTIONS) * len(SHAPES)


def test_prompts_depend_on_the_seed_and_their_number_alone() -> None:
    stream = PromptStream(seed=1)
    prompts = list(islice(stream, 12))
    assert stream.position == 12
    assert list(islice(PromptStream(seed=1, position=5), 7)) == prompts[5:]
    assert list(islice(PromptStream(seed=2), 12)) != prompts
    assert [prompt.job_id for prompt in prompts] == [f"p{number}" for number in range(12)]


def test_tasks_take_turns_and_so_do_their_kinds() -> None:
    prompts = list(islice(PromptStream(seed=0), KINDS))
    assert [prompt.task for prompt in prompts[:4]] == ["shell", "math", "shell", "math"]
    instructions = [str(prompt.instance["instruction"]) for prompt in prompts if prompt.task == "shell"]
    for question in QUESTIONS:
        assert sum(question in instruction for instruction in instructions) == KINDS // 2 // len(QUESTIONS)
    problems = [prompt.instance for prompt in prompts if prompt.task == "math"]
    for shape, answer in SHAPES.items():
        of_shape = [problem for problem in problems if shape in str(problem["problem"])]
        assert len(of_shape) == KINDS // 2 // len(SHAPES)
        assert {problem["ground_truth"] for problem in of_shape} == {str(answer)}
    asked = {str(problem["problem"]) for problem in problems}
    assert asked <= {question.format(shape) for question in MATH_QUESTIONS for shape in SHAPES}


def test_tests_are_greedy_and_have_files_of_their_own() -> None:
    jobs = held_out_jobs(seed=0, count=20, name="t")
    assert jobs == held_out_jobs(seed=0, count=20, name="t")
    assert {job.sampling.temperature for job in jobs} == {0.0}
    seen = {str(prompt.instance["files"]) for prompt in islice(PromptStream(seed=0), 200) if prompt.task == "shell"}
    assert not seen & {str(job.instance["files"]) for job in jobs if job.task == "shell"}

"""An environment of verifiers 0.1: say a word, twice."""

import verifiers as vf
from datasets import Dataset


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="Again.")]


async def right(completion, answer, **kwargs):
    return -2.0 * (answer not in completion[-1].content) + 1.0


async def best(completions, **kwargs):
    return [1.0 for _ in completions]


def load_environment(word="red", group=False):
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Say {word}."}], "answer": word}])
    return Twice(dataset=rows, rubric=vf.Rubric(funcs=[best if group else right]), max_turns=2)

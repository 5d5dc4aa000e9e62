from __future__ import annotations

import math

import numpy as np
from finished_groups import chat, group, with_tool

import prorl_zmq
from prorl_zmq import Group


def test_a_group_gives_its_rewards_and_versions() -> None:
    one = group("a", chat([1], [2], 0.5, version=7), with_tool(1.0))
    assert (one.group_id, one.prompt_id, len(one)) == ("a", "prompt-a", 2)
    assert one.rewards.tolist() == [0.5, 1.0]
    assert one.rewards.dtype == np.float64
    assert one.versions == (4, 5, 7)


def test_a_missing_reward_is_no_number() -> None:
    assert math.isnan(group("a", chat([1], [2], None)).rewards[0])


def test_it_comes_with_the_package() -> None:
    assert prorl_zmq.Group is Group
    assert callable(prorl_zmq.collate)

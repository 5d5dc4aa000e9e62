from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prorl_zmq.brokers.rollout.task_catalog import KNOWN_LIMIT, NEW_TICKS, REMOVED_TICKS, TaskCatalog
from prorl_zmq.client.score_jobs import score_job
from prorl_zmq.errors import Busy, InvalidJob, UnknownTask
from prorl_zmq.wire.messages.chat import ChatSettings
from prorl_zmq.wire.messages.jobs import Harness, Job, NamedModel, Sampling
from prorl_zmq.wire.messages.stages import Task


def catalog_of(fields: dict[str, str], optional: tuple[str, ...] = ()) -> TaskCatalog:
    catalog = TaskCatalog()
    catalog.add([Task("task", fields, optional)])
    return catalog


def check(catalog: TaskCatalog, instance: dict[str, Any]) -> None:
    catalog.check(Job(task="task", instance=instance))


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("str", "x", 1),
        ("int", 1, 1.5),
        ("float", 1.5, "1.5"),
        ("bool", True, 1),
        ("list[str]", ["x"], "x"),
        ("dict[str, str]", {"a": "b"}, {"a": 1}),
    ],
)
def test_each_kind_of_field_is_checked(kind: str, good: object, bad: object) -> None:
    catalog = catalog_of({"value": kind})
    check(catalog, {"value": good})
    with pytest.raises(InvalidJob) as caught:
        check(catalog, {"value": bad})
    assert caught.value.field.startswith("value")


@pytest.mark.parametrize("kind", ["any", "a kind from the future"])
def test_other_kinds_are_left_to_the_handler(kind: str) -> None:
    for value in (1, "x", None, [{}]):
        check(catalog_of({"value": kind}), {"value": value})


def test_the_place_in_a_list_is_named() -> None:
    with pytest.raises(InvalidJob) as caught:
        check(catalog_of({"files": "list[str]"}), {"files": ["a", 2]})
    assert caught.value.field == "files[1]"


@pytest.mark.parametrize("name", ["test-patch", "class", "a b", "", "self", "__dict__"])
def test_a_field_may_have_any_name(name: str) -> None:
    catalog = catalog_of({name: "str"})
    check(catalog, {name: "x"})
    with pytest.raises(InvalidJob, match=f"missing required field `{name}`"):
        check(catalog, {})


def test_optional_fields_may_be_left_out() -> None:
    catalog = catalog_of({"a": "str", "b": "int"}, optional=("b",))
    check(catalog, {"a": "x"})
    with pytest.raises(InvalidJob, match="missing required field `a`"):
        check(catalog, {"b": 1})


def test_a_task_that_is_announced_anew_replaces_the_old_one() -> None:
    catalog = catalog_of({"a": "str"})
    catalog.add([Task("task", {"b": "str"})])
    check(catalog, {"b": "x"})


def test_unknown_tasks_and_the_time_before_the_first_report() -> None:
    with pytest.raises(Busy):
        check(TaskCatalog(), {})
    with pytest.raises(UnknownTask, match="served: task") as caught:
        catalog_of({}).check(Job(task="chess", instance={}))
    assert caught.value.task == "chess"


def test_a_task_that_changes_is_checked_anew() -> None:
    catalog = catalog_of({"value": "str"})
    check(catalog, {"value": "x"})
    catalog.add([Task("task", {"value": "int"})])
    check(catalog, {"value": 1})
    with pytest.raises(InvalidJob):
        check(catalog, {"value": "x"})


def test_of_too_many_tasks_the_one_goes_that_was_announced_longest_ago() -> None:
    catalog = catalog_of({"value": "str"})
    for number in range(KNOWN_LIMIT - 1):
        catalog.add([Task(f"other-{number}")])
    catalog.add([Task("task", {"value": "str"})])
    catalog.add([Task("one more")])
    check(catalog, {"value": "x"})
    with pytest.raises(UnknownTask):
        catalog.check(Job(task="other-0", instance={}))


def test_an_unknown_field_is_refused_with_the_fields_there_are() -> None:
    with pytest.raises(InvalidJob, match="unknown field `prompt`; its fields are problem, ground_truth") as caught:
        check(catalog_of({"problem": "str", "ground_truth": "str"}), {"prompt": "1 + 1?"})
    assert caught.value.field == "prompt"


def test_a_harness_that_no_stage_process_offers_is_refused_with_those_there_are() -> None:
    catalog = TaskCatalog()
    catalog.add([Task("task", harnesses=("codex", "command"))])
    catalog.add([Task("task", harnesses=("mine",))])
    for harness in ("codex", "codex==1.0", Harness("mine")):  # of any node: RUN goes to one that has it
        catalog.check(Job(task="task", instance={}, harness=harness))
    with pytest.raises(InvalidJob, match="no harness 'nope'; the service has codex, command, mine") as caught:
        catalog.check(Job(task="task", instance={}, harness="nope"))
    assert caught.value.field == "harness"


def test_a_service_without_a_policy_scores_texts() -> None:
    catalog = TaskCatalog(["base", "teacher"])
    catalog.add([Task("score", dict.fromkeys(("token_ids", "segments", "top", "chat"), "any"))])
    catalog.check(score_job(np.array([1, 2], np.int32), (), 1, ChatSettings(), "teacher"))


def test_a_model_that_nobody_serves_is_refused_with_those_there_are() -> None:
    catalog = TaskCatalog(["policy", "user"])
    catalog.add([Task("task", models=("judge", "gpt_4_1"))])

    def check(**models: NamedModel | str) -> None:
        catalog.check(Job(task="task", instance={}, models=models))

    check(user="user", other="policy", third=NamedModel("judge", Sampling(temperature=0)))
    check(user="gpt-4.1", other="GPT_4-1")
    assert not catalog.wants_models, "nobody had to be asked"
    with pytest.raises(Busy, match="is listing its models"):
        check(user="sim")
    assert catalog.wants_models
    catalog.list_models(["policy", "sim"])
    check(user="sim")
    problem = (
        r"'smi-2.5' \(models.user\); the service has gpt_4_1, judge, policy, sim, user; an endpoint of that name needs "
        "PRORL_MODEL_SMI_2_5_URL and PRORL_MODEL_SMI_2_5_MODEL in the environment of the RUN stage processes$"
    )
    with pytest.raises(InvalidJob, match=problem) as caught:
        check(user="smi-2.5")
    assert caught.value.field == "models.user"
    for _ in range(NEW_TICKS):
        catalog.tick()
    with pytest.raises(Busy):  # the list is old: one may have come since
        check(user="smi")
    catalog.wants_models = False
    check(user="sim")
    assert catalog.wants_models, "it may have gone since: a new list will say"


def test_models_that_an_instance_names_are_checked_as_those_of_the_job() -> None:
    catalog = TaskCatalog(["policy", "sim"])
    catalog.add([Task("game", {"players": "any"}, models=("far",), model_fields=("players.*.model",))])
    catalog.list_models(["policy", "sim"])

    def check(*models: Any, **more: Any) -> None:
        players = {str(number): {"model": model} for number, model in enumerate(models)}
        catalog.check(Job(task="game", instance={"players": players}, **more))

    check("policy", "sim", "far", 7, model="sim")
    check("user", models={"user": "sim"})
    catalog.check(Job(task="game", instance={"players": {"0": {}, "1": None}}))
    with pytest.raises(InvalidJob, match=r"serves the model 'smi' \(players\.1\.model\); the service has far, policy"):
        check("sim", "smi")


def test_a_job_of_a_model_that_nobody_serves_is_refused_with_those_there_are() -> None:
    catalog = TaskCatalog(["policy", "b"])
    catalog.add([Task("task", models=("judge",))])

    def check(model: str) -> None:
        catalog.check(Job(task="task", instance={}, model=model))

    check("policy")
    check("b")
    assert not catalog.wants_models, "nobody had to be asked"
    with pytest.raises(Busy, match="is listing its models"):
        check("c")
    assert catalog.wants_models
    catalog.list_models(["policy", "c"])
    check("c")
    for unknown in ("d", "judge"):  # an endpoint gives no token ids
        with pytest.raises(InvalidJob, match=rf"'{unknown}' \(model\); the service has b, c, policy$") as caught:
            check(unknown)
        assert caught.value.field == "model"


def test_a_model_that_is_being_removed_stays_refused_although_it_is_still_listed() -> None:
    catalog, job = TaskCatalog(["policy"]), Job(task="task", instance={}, model="a")
    catalog.add([Task("task")])
    catalog.list_models(["policy", "a"])
    catalog.check(job)
    catalog.remove_model("a")
    catalog.list_models(["policy", "a"])
    with pytest.raises(InvalidJob, match=r"no backend serves the model 'a' \(model\); the service has policy$"):
        catalog.check(job)
    assert catalog.keep_model("a"), "the removal was refused"
    assert not catalog.keep_model("a")
    catalog.list_models(["policy", "a"])
    catalog.check(job)
    catalog.remove_model("a")
    catalog.note_model("a")
    catalog.list_models(["policy", "a"])
    catalog.check(job)
    catalog.remove_model("a")
    for _ in range(REMOVED_TICKS):
        catalog.tick()
    catalog.list_models(["policy", "a"])
    catalog.check(job)


def test_the_models_of_a_job_are_its_own_and_those_of_its_roles_and_instance() -> None:
    catalog = TaskCatalog()
    catalog.add([Task("game", {"players": "any"}, model_fields=("players.*.model",))])
    job = Job(task="game", instance={"players": {"0": {"model": "b"}}}, model="a", models={"judge": "c"})
    assert [model for model in ("a", "b", "c", "policy", "game") if catalog.names(job, model)] == ["a", "b", "c"]


def test_without_backends_of_the_policy_in_the_topology_its_jobs_need_one_that_registers() -> None:
    catalog, job = TaskCatalog(["b"]), Job(task="task", instance={})
    catalog.add([Task("task")])
    with pytest.raises(Busy):
        catalog.check(job)
    catalog.list_models(["b"])
    with pytest.raises(InvalidJob, match=r"no backend serves the model 'policy' \(model\); the service has b$"):
        catalog.check(job)
    catalog.list_models(["b", "policy"])
    catalog.check(job)


def test_the_advice_for_a_topology_without_processes_for_teachers_names_all_tables() -> None:
    catalog = catalog_of({})
    words = r'list init, run, eval and score as \[\[stage\]\] tables, .* role = "score" and slots = 64'
    with pytest.raises(InvalidJob, match=words) as caught:
        catalog.check(Job(task="task", instance={}, teacher="policy"))
    assert caught.value.field == "teacher"

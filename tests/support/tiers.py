"""The tiers of tests, which tests belong to each, and how many processes each may start.

- `unit`: objects without a process, and without a sleep; `support.costs` enforces it.
- `process`: one real process, program or sandbox.
- `system`: a whole service.
- `proof`: what is marked `proof` or `vllm`. Runs in turn (see `support.proofs`).

Of a test that is marked `few(n)`, n of its parameters run with their tier; the rest are quick proofs.
"""

from __future__ import annotations

from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

UNIT, PROCESS, SYSTEM, PROOF = TIERS = ("unit", "process", "system", "proof")

OF_PATH = {
    "tests/": UNIT,
    "tests/bench/test_job_cost.py": PROCESS,
    "tests/brokers/backends/test_backend_broker.py": PROCESS,
    "tests/brokers/backends/test_request_handler.py": PROCESS,
    "tests/brokers/journal/test_journal.py::test_crash_between_any_two_statements": PROCESS,
    "tests/brokers/journal/test_journal.py::test_read_only_file_and_folder": PROCESS,
    "tests/brokers/journal/test_file_system.py::test_no_memory_is_shared_where_that_is_not_safe": PROCESS,
    "tests/brokers/journal/test_segment_store.py::test_full_disk_takes_nothing_and_loses_nothing_and_the_reserve_is_for_what_ends": PROCESS,
    "tests/brokers/journal/test_segment_store.py::test_killed_in_the_middle_of_a_block": PROCESS,
    "tests/brokers/rollout/test_job_tracer.py": PROCESS,
    "tests/brokers/rollout/test_rollout_broker.py": PROCESS,
    "tests/brokers/rollout/test_stage_connection.py": PROCESS,
    "tests/chaos/test_nodes.py": PROCESS,
    "tests/chaos/test_proofs.py": PROOF,
    "tests/client/test_connection.py": PROCESS,
    "tests/client/test_endpoint.py": PROCESS,
    "tests/client/test_generated_client.py::test_a_stale_file_is_named": PROCESS,
    "tests/client/test_generated_client.py::test_it_is_not_stale": PROCESS,
    "tests/cluster/test_cluster_folder.py::test_no_change_of_another_process_is_lost": PROCESS,
    "tests/cluster/test_job_script.py": PROCESS,
    "tests/cluster/test_on_slurm.py": SYSTEM,
    "tests/commands/": PROCESS,
    "tests/commands/test_explain.py": UNIT,
    "tests/commands/test_harbor_oracle.py": PROOF,
    "tests/commands/test_job.py": UNIT,
    "tests/commands/test_job.py::test_service_that_is_not_there": PROCESS,
    "tests/commands/test_journal.py": UNIT,
    "tests/commands/test_nodes.py": UNIT,
    "tests/dashboard/": SYSTEM,
    "tests/dashboard/test_run_list.py": UNIT,
    "tests/demo/test_demo.py": PROCESS,
    "tests/demo/test_tasks.py": PROCESS,
    "tests/evaluation/test_regrading.py": PROCESS,
    "tests/evaluation/test_report.py": PROCESS,
    "tests/evaluation/test_run_folder.py::test_one_process_at_a_time_has_it": PROCESS,
    "tests/evaluation/test_tracking.py": PROCESS,
    "tests/gateway/": SYSTEM,
    "tests/gateway/test_http_errors.py": UNIT,
    "tests/gateway/test_page_token.py": UNIT,
    "tests/gateway/test_prorl_answer.py": UNIT,
    "tests/gateway/test_prorl_instances.py": UNIT,
    "tests/gateway/test_settings.py": UNIT,
    "tests/gateway/test_stored_state.py": UNIT,
    "tests/inference/http/test_connections.py": PROCESS,
    "tests/inference/http/test_http_engine.py": PROCESS,
    "tests/inference/http/test_http_scores.py": PROCESS,
    "tests/inference/http/test_probe.py": PROCESS,
    "tests/inference/http/test_real_vllm.py": PROOF,
    "tests/inference/http/test_turn_parser.py": PROCESS,
    "tests/inference/relay/test_keys.py": PROCESS,
    "tests/inference/relay/test_recovery.py": PROCESS,
    "tests/inference/relay/test_weights_relay.py": PROCESS,
    "tests/inference/test_chat_loading.py::test_who_needs_no_chat_format_loads_none": PROCESS,
    "tests/inference/test_embedded_engine.py": PROCESS,
    "tests/inference/test_engine_kind.py": PROCESS,
    "tests/inference/test_host.py": PROCESS,
    "tests/inference/test_kv_event_reader.py": PROCESS,
    "tests/inference/test_root_cause.py": PROCESS,
    "tests/inference/test_scores.py": PROCESS,
    "tests/inference/test_transformers_engine.py": PROCESS,
    "tests/inference/test_vllm_processes.py": PROCESS,
    "tests/inference/vllm/": PROOF,
    "tests/inference/weights/test_killed_copies.py": PROCESS,
    "tests/integrations/test_harbor.py": PROOF,
    "tests/integrations/test_nemo_gym.py": PROCESS,
    "tests/integrations/test_ray.py": PROOF,
    "tests/integrations/test_recipes.py": PROCESS,
    "tests/integrations/test_session.py": SYSTEM,
    "tests/integrations/test_single_jobs.py": PROCESS,
    "tests/integrations/test_skyrl_training.py": PROOF,
    "tests/integrations/test_trainers.py": SYSTEM,
    "tests/integrations/test_trl.py": PROOF,
    "tests/integrations/test_verl_training.py": PROOF,
    "tests/make_swe/test_project_image.py": PROCESS,
    "tests/make_swe/test_make_swe.py::test_a_base_image_that_is_not_there_is_named": PROCESS,
    "tests/make_swe/test_make_swe.py::test_a_base_image_without_python_is_refused": PROCESS,
    "tests/make_swe/test_mutation.py::test_patches_apply_and_reverse": PROCESS,
    "tests/make_swe/test_project.py": PROCESS,
    "tests/make_swe/test_whole.py": PROOF,
    "tests/metrics/test_catalog.py::test_the_page_has_all_metrics": PROCESS,
    "tests/metrics/test_reporter.py::TestWithACollector": PROCESS,
    "tests/model_proxy/test_server.py": PROCESS,
    "tests/model_proxy/test_vllm.py": PROOF,
    "tests/security/test_security_md.py": PROCESS,
    "tests/security/test_service.py": SYSTEM,
    "tests/service/": SYSTEM,
    "tests/service/test_child.py": PROCESS,
    "tests/service/test_child_output.py": UNIT,
    "tests/service/test_engine_starts.py": UNIT,
    "tests/service/test_full_disk.py": PROOF,
    "tests/service/test_harnesses.py": PROOF,
    "tests/service/test_metrics.py": UNIT,
    "tests/service/test_node_rows.py": UNIT,
    "tests/service/test_notify.py": UNIT,
    "tests/service/test_outside_kills.py": PROOF,
    "tests/service/test_outside_programs.py": PROOF,
    "tests/service/test_pauses.py": PROOF,
    "tests/service/test_real_engines.py": PROOF,
    "tests/service/test_restarts.py": PROOF,
    "tests/service/test_rollout_brokers.py": UNIT,
    "tests/service/test_saboteurs.py": PROOF,
    "tests/service/test_service_folder.py": PROCESS,
    "tests/service/test_weight_updates.py": PROOF,
    "tests/service/test_wire.py": UNIT,
    "tests/stages/": PROCESS,
    "tests/stages/harness/test_adapters.py": UNIT,
    "tests/stages/harness/test_call_tree.py": UNIT,
    "tests/stages/harness/test_captured_harnesses.py": PROOF,
    "tests/stages/harness/test_real_harnesses.py": PROOF,
    "tests/stages/test_conversation.py": UNIT,
    "tests/stages/test_answer_corpus.py": UNIT,
    "tests/stages/test_backend_client.py": UNIT,
    "tests/stages/test_backend_client.py::test_a_job_waits_for_a_backend_that_is_starting_longer_than_it_allows": PROCESS,
    "tests/stages/test_code_output.py": UNIT,
    "tests/stages/test_episode.py": UNIT,
    "tests/stages/test_event_outbox.py": UNIT,
    "tests/stages/test_handler.py": UNIT,
    "tests/stages/test_handler.py::test_users_package_adds_a_task_and_broken_handlers_cost_only_those_who_ask": PROCESS,
    "tests/stages/test_held_assignments.py": UNIT,
    "tests/stages/test_llm_judge.py": UNIT,
    "tests/stages/test_llm_judge.py::test_busy_and_broken_servers_are_asked_again": PROCESS,
    "tests/stages/test_llm_judge.py::test_servers_that_stay_so_are_an_infrastructure_error": PROCESS,
    "tests/stages/test_mcp.py": PROOF,
    "tests/stages/test_phase_runner.py": UNIT,
    "tests/stages/test_stop_texts.py": UNIT,
    "tests/stages/test_turn_sampler.py": UNIT,
    "tests/system/test_fork_server.py": PROCESS,
    "tests/system/test_open_files.py": PROCESS,
    "tests/system/test_pauses.py": PROCESS,
    "tests/system/test_processes.py": PROCESS,
    "tests/system/test_traces.py::test_a_forked_child_has_no_thread_of_the_sdk": PROCESS,
    "tests/system/test_traces.py::test_without_them_nothing_of_opentelemetry_is_imported": PROCESS,
    "tests/system/test_used_memory.py": PROCESS,
    "tests/mutants/test_run.py": PROCESS,
    "tests/test_bench.py": PROCESS,
    "tests/test_ci.py": PROCESS,
    "tests/test_documents.py": SYSTEM,
    "tests/test_packaging.py": PROCESS,
    "tests/test_support.py": PROCESS,
    "tests/testing/": PROCESS,
    "tests/tools/": PROCESS,
    "tests/tools/editor/test_entry.py": UNIT,
    "tests/tools/editor/test_history.py": UNIT,
    "tests/tools/execution/test_memory_files.py": UNIT,
    "tests/tools/execution/test_memory_files.py::test_a_file_counts_once_however_often_it_is_open": PROCESS,
    "tests/dockerfile/test_stages.py::test_scripts_are_for_every_shell": PROCESS,
    "tests/dockerfile/test_stages.py::test_words_have_one_value_here_and_in_the_shell": PROCESS,
    "tests/stages/environments/test_real_environments.py": PROOF,
    "tests/stages/environments/test_real_worlds.py": PROOF,
    "tests/tools/images/test_dockerfile_build.py": PROOF,
    "tests/tools/images/test_image.py": UNIT,
    "tests/tools/mcp/": UNIT,
    "tests/tools/mcp/test_http.py": PROCESS,
    "tests/tools/images/test_definition.py": UNIT,
    "tests/tools/images/test_sources.py": UNIT,
    "tests/tools/images/test_sources.py::test_a_folders_identity_changes_with_its_content": PROCESS,
    "tests/tools/mcp/test_real_servers.py": PROOF,
    "tests/tools/mcp/test_servers.py": PROOF,
    "tests/tools/sandbox/test_grading_folders.py": PROOF,
    "tests/tools/sandbox/test_root_image.py": UNIT,
    "tests/tools/sandbox/test_root_image.py::test_specs_are_held_to_the_folders_and_the_default_is_not": PROCESS,
    "tests/tools/sandbox/test_tree.py": UNIT,
    "tests/tools/test_editor_tool.py": UNIT,
    "tests/tools/test_http_search.py": UNIT,
    "tests/tools/test_http_search.py::test_the_time_limit_holds_for_the_waits_too": PROCESS,
    "tests/tools/test_bash_keys.py": UNIT,
    "tests/tools/test_node_facts.py": UNIT,
    "tests/tools/test_output.py": UNIT,
    "tests/tools/test_search.py": UNIT,
    "tests/tools/test_shell_text.py": UNIT,
    "tests/tools/test_think_and_finish.py": UNIT,
    "tests/tools/test_tool.py": UNIT,
    "tests/trackers/test_libraries.py": PROCESS,
    "tests/trackers/test_tracker_process.py": PROCESS,
    "tests/wire/test_async_socket.py": PROCESS,
    "tests/wire/test_sockets.py::test_a_second_process_on_a_live_endpoint_is_refused": PROCESS,
}
"""Tiers by the beginning of a test's id; the longest beginning decides."""


class Limit(NamedTuple):
    """The most that the tests of a tier may start in one run."""

    processes: int
    interpreters: int


LIMITS = {
    UNIT: Limit(processes=0, interpreters=0),
    PROCESS: Limit(processes=7_500, interpreters=480),
    SYSTEM: Limit(processes=1_300, interpreters=130),
}


def tier_of_id(test: str) -> str:
    """Return the tier of a test, or of a test file, that is no proof."""
    return OF_PATH[next(beginning for beginning in _beginnings(test.split("::")[0]) if begins(test, beginning))]


@cache
def _beginnings(path: str) -> list[str]:
    """Return the beginnings that tests of a file may have, the longest first."""
    found = [beginning for beginning in OF_PATH if begins(path, beginning) or beginning.startswith(f"{path}::")]
    return sorted(found, key=len, reverse=True)


def begins(test: str, beginning: str) -> bool:
    """Return whether a test is in a folder or file, or is a function with any parameters."""
    return test.startswith(beginning) and (beginning.endswith("/") or test[len(beginning) :][:1] in {"", ":", "[", "@"})


def tiers_of_file(path: str) -> set[str]:
    """Return the tiers that tests of a file may have, unless they are proofs."""
    return {tier_of_id(path), *(tier for test, tier in OF_PATH.items() if test.startswith(f"{path}::"))}


def mark_all_but_few(items: Iterable[pytest.Item]) -> None:
    """Mark tests as quick proofs, but for as many parameters of each function as its mark `few` says."""
    marked = [item for item in items if item.get_closest_marker("few") and not item.get_closest_marker("proof")]
    for _, parameters in groupby(marked, key=lambda item: item.nodeid.split("[")[0]):
        tests = list(parameters)
        mark = tests[0].get_closest_marker("few")
        assert mark is not None
        (number,) = mark.args
        kept = {index * len(tests) // number for index in range(number)}  # from all parts of a matrix
        for index, item in enumerate(tests):
            if index not in kept:
                item.add_marker(pytest.mark.proof(quick=True))


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a collected test."""
    if item.get_closest_marker("proof") or item.get_closest_marker("vllm"):
        return PROOF
    return tier_of_id(item.nodeid)

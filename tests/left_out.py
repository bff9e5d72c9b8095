"""What `make test` leaves out, and why; `make test-all`, which sets ATTN_TESTS=all, runs it.

Each reason has files of tests/, and of each the tests that it holds for. Beside these, a test that asks many cases alike is
marked `one_in(n)`, and a value of a parameter that only adds a slower way is marked `slow`. Stories of tests/plugin are told
through an xdist worker as well, which is left out but for those that are marked `twice`.
"""

import os

#: whether nothing is left out
IS_ALL = os.environ.get("ATTN_TESTS") == "all"
#: pages of docs/ whose blocks start ranks or other processes, time, or judge many models
PAGES = (
    *("howto/baselines.md", "howto/isolated.md", "howto/model.md", "howto/model-latency.md", "howto/paged-ranks.md"),
    *("howto/ranks.md", "howto/report.md", "howto/several-gpus.md", "howto/stronger-tests.md"),
)
LEFT_OUT = {
    "it starts an environment or a tool; `make lint` or the workflow of a release does the same": {
        "test_extras.py": (
            "test_the_extra_failures_saves_tensors_that_fail_again",
            "test_the_extra_fuzz_draws_workloads",
            "test_the_extra_report_writes_a_page",
            "test_without_extras_the_plugin_judges_and_says_what_each_option_needs",
        ),
        "test_prose.py": ("test_everything_that_people_read_is_clean",),
        "test_wheel.py": (
            "test_the_wheel_gives_the_first_verdict_of_the_readme",
            "test_a_downstream_repository_runs_its_tests_and_the_bundled_suite",
            "test_the_sdist_installs_and_has_what_the_wheel_has",
        ),
    },
    "it starts processes, and what they carry there and back is tested within one": {
        "cheats/test_honest.py": ("test_none_is_refused_where_another_process_computes",),
        "plugin/test_latency.py": (
            "test_one_worker_times_and_its_verdict_arrives",
            "test_require_fails_where_workers_share_the_device",
        ),
        "plugin/test_merge.py": (
            "test_a_group_is_the_same_through_xdist",
            "test_a_run_that_is_killed_is_not_whole_even_if_it_leaves_an_earlier_file",
            "test_workers_that_crash_are_no_whole_run",
        ),
        "plugin/test_new_property.py": ("test_it_is_documented_wherever_a_callable_s_properties_are",),
        "plugin/test_mutants_option.py": ("test_workers_bring_what_they_found",),
        "plugin/test_options.py": (
            "test_a_case_in_a_group_can_be_reproduced",
            "test_xdist_says_how_many_workers_there_are",
            "test_the_workers_of_xdist_share_a_random_seed",
        ),
        "plugin/test_rank_backends.py": (
            "test_torch_rotates_and_balances_as_it_is_asked",
            "test_flex_gathers_keys_and_cuts_its_mask",
            "test_rings_around_a_flash_kernel_are_right_and_their_faults_are_found",
            "test_a_listing_counts_cases_over_ranks",
        ),
        "plugin/test_rank_latency.py": (
            "test_slower_ranks_fail_and_baselines_are_of_so_many_ranks_and_their_links",
            "test_a_rank_that_fails_ends_the_measurement_and_no_other",
            "test_off_checks_and_does_not_time",
            "test_the_slow_rank_is_named_and_the_record_says_all",
        ),
        "plugin/test_ranking.py": ("test_workers_that_share_a_device_time_nothing",),
        "plugin/test_ranks.py": (
            "test_no_rank_outlives_its_judge",
            "test_ranks_that_cannot_be_forked_begin_by_themselves",
            "test_a_torch_without_distributed_judges_what_runs_in_one_process",
        ),
        "plugin/test_save_failures.py": (
            "test_a_kernel_of_a_test_module_is_judged_again_by_repro",
            "test_workers_write_a_folder_for_each_case",
            "test_repro_knows_no_folder_of_this_machine",
        ),
        "reports/test_html.py": ("test_the_page_is_written_without_torch_or_pytest",),
        "session/test_sharing.py": ("test_two_processes_do_not_time_on_one_device_at_a_time",),
        "workloads/test_inputs.py": ("test_another_process_draws_the_same_values",),
    },
    "it records or times in many processes, of which others test each part": {
        "correctness/test_dropout.py": ("test_a_kernel_with_dropout_is_timed",),
        "correctness/test_empty_rows.py": ("test_a_kernel_that_leaves_nan_there_can_be_timed",),
        "correctness/test_signatures.py": ("test_what_is_timed_is_the_callable_alone",),
        "latency/test_contention.py": ("test_the_reference_loop_of_one_thread_is_an_anchor",),
        "latency/test_protocol.py": ("test_a_time_in_batches_is_never_held_against_one_in_a_graph",),
        "latency/test_work.py": ("test_the_plugin_s_own_backends_can_be_timed",),
        "plugin/test_benchmark_options.py": ("test_a_saved_run_is_compared_and_fails_when_slower",),
        "plugin/test_latency.py": (
            "test_what_pytest_benchmark_fails_hides_no_verdict",
            "test_every_direction_returns_its_latency",
        ),
        "plugin/test_model_latency.py": ("test_what_is_wrong_is_never_timed",),
        "plugin/test_recording.py": ("test_a_recording_replaces_disturbed_processes", "test_recording_says_what_it_wrote"),
        "session/test_progress.py": (
            "test_a_slow_kernel_is_named_and_nothing_stays",
            "test_the_time_left_is_known_from_the_run_before",
        ),
    },
    "it compiles with torch.compile": {
        "correctness/test_declared_orders.py": ("test_flex_takes_it",),
        "models/test_compiled_models.py": (
            "test_a_step_that_is_compiled_again_each_time_says_so",
            "test_an_honest_compiled_model_whose_gradients_vanish_passes",
            "test_what_draws_random_numbers_by_itself_is_not_compared",
        ),
        "models/test_rows_without_keys.py": ("test_a_compiled_model_that_fills_them_otherwise_is_not_compared",),
        "plugin/test_model_latency.py": ("test_a_step_that_is_compiled_again_while_it_is_timed_is_refused",),
    },
    "it draws workloads, as tests beside it do": {
        "plugin/test_declining.py": ("test_draws_of_fuzz_are_refused_one_by_one",),
        "plugin/test_fuzz.py": (
            "test_a_failure_is_replayed_first_the_next_time",
            "test_the_printed_test_fails_in_the_same_way",
            "test_the_printed_test_of_a_backend_names_it_and_keeps_other_decorators",
            "test_each_item_replays_its_own_failure",
            "test_refusals_are_counted_and_no_draw",
            "test_where_every_draw_is_refused_the_item_is_skipped_with_the_reason",
            "test_a_test_may_refuse_a_draw_itself",
            "test_only_what_the_markers_workloads_show_is_drawn",
            "test_without_hypothesis_the_run_says_what_to_install",
            "test_a_seed_that_is_given_also_draws_the_workloads",
            "test_the_first_failure_ends_a_run_with_x_and_junit_has_the_workload",
        ),
        "strategies/test_strategies.py": ("test_a_users_own_test_finds_a_fault", "test_everything_that_may_be_drawn_is"),
        "workloads/test_features.py": ("test_the_catalog_has_what_the_script_generates",),
    },
    "it makes many calls, or large ones; fewer or smaller ones are asked beside it": {
        "cheats/test_cheats.py": ("test_those_that_take_long_are_refused_too",),
        "cheats/test_honest.py": ("test_none_is_refused_by_invariants_or_by_measure", "test_none_is_refused_on_cuda"),
        "correctness/test_long.py": ("test_what_tensor_cores_cut_off_a_sum_of_a_million_products_is_granted",),
        "diagnosis/test_explanation.py": ("test_an_accumulator_in_the_dtype_is_no_matter_of_a_profile",),
        "models/test_module.py": ("test_a_backend_computes_the_core",),
        "plugin/test_declared_signatures.py": ("test_faulty_kernels_stand_in_for_one_with_a_signature",),
        "plugin/test_invariants_method.py": ("test_thorough_asks_more",),
        "plugin/test_mutants_option.py": (
            "test_a_lax_test_kills_nothing_and_the_survivors_are_named",
            "test_a_test_that_fails_on_the_honest_kernel_is_a_failed_test",
            "test_a_mutant_is_run_until_it_is_killed",
        ),
        "reports/test_html.py": ("test_five_thousand_cases_are_a_few_megabytes",),
        "reports/test_html_browser.py": ("test_five_thousand_cases_open_in_under_two_seconds_and_ask_for_nothing",),
    },
    "it is another way to what a test beside it asks": {
        "plugin/test_attention_model.py": (
            "test_a_known_defect_of_what_the_model_chose_fails_unless_it_is_excused",
            "test_a_listing_counts_each_model_of_a_parametrized_test",
            "test_backends_of_the_marker_and_a_forward_pass_only",
            "test_one_refused_call_fails_and_does_not_skip",
            "test_refusals_of_single_calls_are_a_skip_where_they_are_excused_and_the_rest_is_right",
        ),
        "plugin/test_commands.py": ("test_a_report_of_two_runs",),
        "plugin/test_main.py": ("test_the_command_that_it_closes_with_runs",),
        "reports/test_html_access.py": ("test_paper_gets_every_section_and_no_controls",),
        "reports/test_html_browser.py": (
            "test_hostile_text_is_shown_and_does_nothing",
            "test_a_run_without_attention_tests_and_odd_records_open_as_well",
        ),
    },
}

"""The claims of SECURITY.md, one by one, each with the test that proves it.

The table holds each claim in the page's own words. A claim that is reworded or added without its test, and a test that is
renamed, fail here; the tests of claims that no other file proves are below, named after their sentences.
"""

import ast
import hashlib
import importlib.metadata
import re
import socket
from functools import cache
from pathlib import Path

import pytest
from titan_train.cli import COMMANDS, main

ROOT = Path(__file__).parents[4]
HERE = "titan-train/tests/trust/test_security_claims.py"
TRUST = "titan-train/tests/trust/test_trust.py"
SIZE = "titan-train/tests/trust/test_input_size.py"
CLAIMS = {
    "What titan's ranks send each other is tensors and JSON, and nothing of it is unpickled.": [
        "titan-train/tests/test_exchange.py::test_no_package_reads_what_can_run_code_but_the_import_of_dcp_by_an_allow_list",
    ],
    "nothing is unpickled": [
        f"{HERE}::test_nothing_is_unpickled",
        "titan-ckpt/tests/test_damage.py::test_a_pickle_in_place_of_any_file_runs_no_code",
        "titan-ckpt/tests/test_dcp.py::test_hostile_pickles_in_a_dcp_checkpoint_run_no_code",
        "titan-pipeline/tests/test_boundary.py::test_no_source_file_unpickles",
    ],
    "only of a folder or a package that you name": [
        f"{TRUST}::test_a_toml_file_alone_runs_no_code_through_an_installed_package",
        f"{TRUST}::test_an_installed_package_is_used_only_if_it_is_named",
    ],
    "only after `--trust-code`": [
        f"{TRUST}::test_a_run_folder_made_elsewhere_needs_trust_once_and_again_after_a_change"
    ],
    "only an AOTInductor package, after `--trust-code`": [
        f"{TRUST}::test_machine_code_in_an_exported_folder_is_loaded_only_if_this_account_wrote_it"
    ],
    "Python files and pickles in the folder are never read": [
        f"{TRUST}::test_an_exported_folder_s_own_python_and_pickles_are_not_read"
    ],
    "Nothing else is imported: not from the working directory": [
        f"{TRUST}::test_a_module_of_the_working_directory_is_imported_only_if_its_folder_is_named",
        f"{TRUST}::test_a_name_in_a_configuration_or_a_run_folder_runs_nothing",
    ],
    "The callable is a class or a function at the top level of its module, defined in that package": [
        f"{TRUST}::test_only_what_a_module_itself_defines_at_its_top_level_is_called"
    ],
    "a subclass of `nn.Module`, or a function annotated to return one. Anything else is not called": [
        f"{TRUST}::test_a_function_that_does_not_declare_a_module_is_not_called"
    ],
    "this account must have started that folder with that very source": [
        f"{TRUST}::test_ones_own_run_goes_on_without_being_asked_until_its_code_changes"
    ],
    "so that a folder cannot bring its own": [f"{TRUST}::test_a_folder_cannot_bring_its_own_trust"],
    "The hash covers every module, in Python or compiled": [
        f"{TRUST}::test_every_folder_of_a_namespace_package_and_compiled_modules_count_as_source",
        f"{TRUST}::test_folders_that_a_package_links_to_count_as_source",
    ],
    "bytecode beside it, which may be of another source, is not used": [
        f"{TRUST}::test_bytecode_beside_the_source_is_not_run"
    ],
    "A package in an archive is refused": [f"{TRUST}::test_a_package_in_an_archive_is_refused"],
    "The processes that a command starts do not import from the working directory either": [
        f"{TRUST}::test_processes_that_a_command_starts_import_nothing_from_the_working_directory",
        "titan-train/tests/launch/test_ray.py::test_actors_do_not_import_from_the_working_directory",
    ],
    "are imported only if the name of a task, a tracker or a key map asks for them": [
        f"{HERE}::test_entry_points_of_trackers_and_key_maps_are_imported_only_if_a_name_asks_for_them"
    ],
    "none opens a port": [f"{HERE}::test_no_tracker_opens_a_port"],
    "`check`, `plan`, `list`, `doctor`": [f"{HERE}::test_commands_that_only_look_write_nothing_and_ask_no_network"],
    "(`confirm_run_unsafe_code` is off)": [f"{HERE}::test_the_harness_s_own_code_for_a_task_never_runs_unasked"],
    "complete or not at all; it never replaces one": [
        "titan-train/tests/export/test_targets.py::test_of_two_exports_at_once_the_first_one_stays"
    ],
    "With `--token-file` it answers whoever sends the token, by whatever name it was asked, and nobody else": [
        "titan-train/tests/serve/test_loopback.py::test_other_machines_are_answered_with_the_token_alone"
    ],
    "`--host` is refused without it": [
        "titan-train/tests/serve/test_loopback.py::test_a_host_without_a_secret_is_refused_before_anything_is_loaded"
    ],
    "listens on 127.0.0.1 only": ["titan-train/tests/observe/test_watching.py::test_the_page_is_live_on_loopback_only"],
    "One request is answered at a time and 16 are held": [
        "titan-train/tests/serve/test_loopback.py::test_only_so_many_requests_are_held_at_a_time",
        "titan-train/tests/serve/test_serve.py::test_a_bad_request_gets_an_error_of_openais_shape",
    ],
    "answer only to names of this machine, only JSON, and nothing that a browser sends from another page": [
        "titan-train/tests/serve/test_loopback.py::test_a_page_of_another_site_is_refused",
        "titan-train/tests/serve/test_loopback.py::test_every_server_is_behind_it",
    ],
    "restoring fails when the sizes are not the model's, before memory is allocated for them": [
        "titan-ckpt/tests/test_hostile.py::test_a_malformed_index_is_damage_of_the_index",
        "titan-ckpt/tests/test_hostile.py::test_a_frame_that_unpacks_to_a_gigabyte_takes_no_more_memory_than_is_allowed",
    ],
    "compressed files are read in bounded memory, whatever they decompress to": [
        f"{SIZE}::test_a_small_compressed_file_is_read_in_little_memory",
        f"{SIZE}::test_a_small_file_with_a_window_of_two_gib_is_refused",
    ],
    "32 rows, a page or a compressed batch are held at a time": [
        f"{SIZE}::test_a_row_that_a_table_stores_once_for_many_is_not_held_many_times"
    ],
    "Megatron pairs and token folders are checked when they are opened": [
        "titan-train/tests/data/test_megatron.py::test_a_malformed_pair_is_refused_with_the_file_and_the_place_in_it",
        "titan-train/tests/data/test_token_folders.py::test_a_wrong_token_folder_is_refused_and_left_as_it_was",
    ],
    "it reaches no attribute, file or module of Python": [
        "titan-train/tests/tokenizers/test_chat_template.py::test_a_template_reaches_nothing_outside"
    ],
    "nor kernels of a hub (`attn_implementation`)": [
        f"{TRUST}::test_a_published_folder_that_names_kernels_of_a_hub_is_refused"
    ],
    "quantized weights become plain numbers, without such kernels": [
        "titan-train/tests/train/test_quantized_folders.py::test_an_exported_folder_in_mxfp4_asks_for_no_kernels_of_a_hub",
        "titan-train/tests/export/test_targets.py::test_float8_folders_are_read_by_transformers",
    ],
    "into a folder of their own (trackio: `TRACKIO_DIR`": [
        "titan-train/tests/observe/test_more_trackers.py::test_trackio_keeps_each_run_s_steps_in_its_database_by_a_name_of_its_own"
    ],
    "never loads pickles or Python files": [
        "titan-train/tests/hub/test_download.py::test_what_may_run_code_is_never_loaded"
    ],
    "refuses names that lead out of the folder": [
        "titan-train/tests/hub/test_download.py::test_names_that_lead_out_of_the_folder_are_refused"
    ],
    "compares every file with the hash that the server states": [
        "titan-train/tests/hub/test_download.py::test_a_file_that_changed_on_the_way_is_refused_and_removed"
    ],
    "a file that is a link is refused": [
        "titan-train/tests/run_folder/test_lease.py::test_a_file_elsewhere_is_not_written_through_a_link"
    ],
    "runs no script but the page's own, named by hash, and allows no requests": [
        "titan-train/tests/report/test_browser.py::test_a_script_that_got_past_the_escaping_does_not_run"
    ],
    "Whatever a command prints to a terminal is text": [
        "titan-train/tests/trust/test_terminal.py::test_a_stranger_s_run_folder_does_not_command_the_terminal"
    ],
    "it may have 1 MB and keys of 100 parts": [
        f"{SIZE}::test_a_toml_file_out_of_all_proportion_is_refused_in_a_few_words"
    ],
    "is refused if matching a name of 100 characters may take more than a million tries": [
        f"{SIZE}::test_a_pattern_that_may_not_end_is_refused"
    ],
    "Ranks on one machine meet through files and loopback": [
        "titan-train/tests/launch/test_supervisor.py::test_local_ranks_listen_on_nothing_beyond_loopback",
        "titan-train/tests/launch/test_environment.py::test_ranks_that_meet_through_a_file_talk_over_loopback",
    ],
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_is_in_the_page_and_has_its_test(claim):
    page = " ".join((ROOT / "SECURITY.md").read_text(encoding="utf-8").split())
    assert claim in page
    for place in CLAIMS[claim]:
        file, _, name = place.partition("::")
        assert name in functions_of(ROOT / "packages" / file), place


def test_the_table_names_every_command():
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    table = page.partition("## What a command may do")[2].partition("\n\n`serve` has")[0]
    assert [name for name in COMMANDS if f"`{name}`" not in table] == []


@cache
def functions_of(file):
    """Names of the functions that a file defines."""
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


UNPICKLES = re.compile(
    r"pickle\.loads?\(|_?Unpickler\(|cloudpickle|joblib\.|torch\.load\((?![^)]*weights_only=True)|np\.load\(|numpy\.load\(|allow_pickle=True|shelve|marshal"
)
# DCP's metadata by an allow list, and its items by torch's `weights_only` loader
ALLOWED = {"packages/titan-ckpt/src/titan_ckpt/interop/dcp_import.py"}


def test_nothing_is_unpickled():
    found = {}
    for file in sorted((ROOT / "packages").glob("*/src/**/*.py")):
        code = re.sub(r'(?s)""".*?"""|#[^\n]*', "", file.read_text(encoding="utf-8"))
        if calls := UNPICKLES.findall(code):
            found[str(file.relative_to(ROOT))] = calls
    assert {file: calls for file, calls in found.items() if file not in ALLOWED} == {}


LOOK = [["check", "debug"], ["check", "llama3_8b", "--hardware", "h100", "--devices", "8"], ["list"], ["doctor"],
        ["check", "debug", "--rehearse", "--devices", "2"],
        ["plan", "llama3_1b", "--devices", "2", "--global-batch", "8"]]  # fmt: skip


@pytest.mark.parametrize("words", LOOK, ids=" ".join)
def test_commands_that_only_look_write_nothing_and_ask_no_network(words, tmp_path, monkeypatch, capsys):
    def refuse(self, address, *rest):
        if self.family != socket.AF_UNIX:
            raise AssertionError(f"asks {address}")
        return connect(self, address, *rest)

    connect = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(AssertionError("asks for a name"))
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept.txt").write_text("kept")
    main(words)
    assert "Traceback" not in capsys.readouterr().err
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.rglob("*")} == {
        "kept.txt": hashlib.sha256(b"kept").hexdigest()
    }


def test_entry_points_of_trackers_and_key_maps_are_imported_only_if_a_name_asks_for_them(monkeypatch, tmp_path, capsys):
    asked = []

    class Entry:
        name, value, group = "evil", "evil_package:Evil", "any"
        dist = None

        def load(self):
            asked.append(self.name)
            raise ImportError("evil_package was imported")

    entries = importlib.metadata.entry_points
    groups = ("titan_train.trackers", "titan_ckpt.key_maps")

    def with_evil(**select):
        return (Entry(),) if select.get("group") in groups else entries(**select)

    for module in ("importlib.metadata", "titan_train.observe.trackers"):
        monkeypatch.setattr(f"{module}.entry_points", with_evil)
    monkeypatch.chdir(tmp_path)
    assert main(["check", "debug"]) == 0
    assert main(["list"]) == 0
    assert asked == []
    assert main(["check", "debug", "--metrics.trackers", '["evil"]']) != 0 or asked == []


def test_no_tracker_opens_a_port():
    for file in (ROOT / "packages/titan-train/src/titan_train/observe").glob("*.py"):
        assert not re.search(r"start_http_server|\.listen\(|\.bind\(|HTTPServer", file.read_text()), file.name


def test_the_harness_s_own_code_for_a_task_never_runs_unasked():
    text = (ROOT / "packages/titan-train/src/titan_train/eval/harness.py").read_text()
    assert "confirm_run_unsafe_code=False" in text
    assert "confirm_run_unsafe_code=True" not in text

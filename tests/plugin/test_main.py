"""`python -m pytest_attn`."""

import subprocess
import sys

import pytest
import torch

from pytest_attn import __version__
from pytest_attn.__main__ import main
from pytest_attn.backends import machine
from pytest_attn.backends.machine import Machine


def printed(capsys, *arguments):
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def test_it_prints_versions_then_the_tables_then_how_to_go_on(capsys):
    lines = printed(capsys, "--device", "cpu")
    assert lines[0].split() == ["pytest-attn", __version__]
    assert lines[1].split() == ["python", sys.version.split()[0]]
    assert ["torch", torch.__version__] in [line.split() for line in lines[:4]]
    assert lines[lines.index("") - 1].startswith("device       cpu, ")
    headers = [line.split()[0] for line, before in zip(lines[1:], lines, strict=False) if before == ""]
    assert any(line.startswith("hub:REPO ") for line in lines)
    assert headers == ["backend", "backend", "workload", "next:"]
    assert lines[-1] == (
        "next: pytest --pyargs pytest_attn.suite --attn-workloads=smoke --attn-device=cpu"
        "  (the bundled tests, on small workloads)"
    )


def test_the_tables_are_those_of_attn_list(capsys, pytester):
    mine = printed(capsys, "--device=cpu")
    listed = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--attn-list", "--attn-device=cpu").outlines
    tables = mine[mine.index("") + 1 : -1]
    first = listed.index(tables[0])
    assert listed[first : first + len(tables)] == tables


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--help"], 0, "usage: python -m pytest_attn [-h] [--version] [--device DEVICE] COMMAND ..."),
        (["--version"], 0, f"pytest-attn {__version__}"),
        (["--bogus"], 2, "error: unrecognized arguments: --bogus"),
        (["flux"], 2, "invalid choice: 'flux' (choose from "),
        (["report"], 2, "error: the following arguments are required: FILE.jsonl"),
        (["summary", "."], 2, "summary: error: . is a folder; name the .jsonl file in it"),
        (["report", "no.jsonl"], 2, "report: error: there is no no.jsonl; pytest --attn-output=no.jsonl writes it"),
        (["summary", __file__], 2, f"{__file__}, line 1: is not JSON"),
        (["report", sys.executable], 2, "is not UTF-8"),
        (["--device", "tpu"], 2, "error: argument --device: unknown device 'tpu'; expected auto, cpu, cuda"),
        (["--device", "xpu:7"], 2, "error: argument --device: device 'xpu:7' is not there; this machine has"),
    ],
)
def test_arguments_behave_as_people_expect(capsys, arguments, code, text):
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == code
    captured = capsys.readouterr()
    assert text in (captured.err if code else captured.out)


def run_without(module, *arguments):
    code = f"import runpy, sys; sys.modules[{module!r}] = None; runpy.run_module('pytest_attn', run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_a_missing_torch_is_said_in_one_line():
    done = run_without("torch")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == 'pytest-attn needs torch, which is not installed; pip install "pytest-attn[torch]"\n'
    assert run_without("torch", "--help").returncode == 0


def test_a_gpu_has_more_versions(monkeypatch, tmp_path):
    gpu = Machine("cuda:0", "H200", (9, 0), "sm90", 1 << 37, 1, "2.11.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine, "_driver", lambda: "580.95.05")
    found = machine.versions_of(gpu)
    assert (found["cuda"], found["driver"], found["torch"]) == ("13.0", "580.95.05", "2.11.0+cu130")
    assert "rocm" not in found


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\nGCC version: 12",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)",
    ],
)
def test_the_driver_is_what_its_kernel_module_says(monkeypatch, tmp_path, text):
    path = tmp_path / "version"
    path.write_text(text)
    monkeypatch.setattr("builtins.open", lambda name, **options: path.open(**options))
    assert machine._driver() == "580.95.05"

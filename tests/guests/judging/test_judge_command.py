"""`python -m pytest_attn judge` prints one JSON object and nothing else, and a server of verdicts is ended by no line."""

import io
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from judged_kernels import KERNELS, as_described

from pytest_attn import Pages, Window, Workload
from pytest_attn.__main__ import main
from pytest_attn.guests.judging import judge_command
from pytest_attn.guests.judging.answers import workloads_of

ONE = '{"q_len": 40, "heads": 2, "head_dim": 32, "dtype": "float32"}'


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """Return a function that runs the command, and returns its status and what it has printed to stdout."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels.py").write_text(KERNELS)
    monkeypatch.setattr(judge_command, "_close_to_others", lambda: None)

    def run(*words, stdin=b""):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        monkeypatch.setattr(sys, "argv", ["pytest_attn", "judge", "--device=cpu", *words])
        code = main()
        return code, capfd.readouterr().out

    return run


@pytest.mark.parametrize(
    ("kernel", "code"),
    [("right", 0), ("printing", 0), ("wrong", 1), ("exits_at_once", 1), ("declines", 2), ("sleeps", 2), ("no_such", 2)],
)
def test_it_prints_one_object_whatever_the_kernel_does(command, kernel, code):
    seconds = 1 if kernel == "sleeps" else 60
    found, out = command(f"kernels.py:{kernel}", f"--workloads={ONE}", "--json", f"--budget-s={seconds}")
    assert out.count("\n") == 1
    answer = as_described(json.loads(out))
    assert (found, answer["right"]) == (code, {0: True, 1: False, 2: None}[code])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("none.py", f"--workloads={ONE}"), "there is no file 'none.py'"),
        (("kernels.py:right", "--workloads=none"), "unknown workload 'none'"),
        (("kernels.py:right", '--workloads={"q_len": 4, "rows": 1}'), "Workload has no field 'rows'"),
        (("kernels.py:right", "--workloads={"), "--workloads: Expecting property name"),
        (("kernels.py:right", "--workloads=/a.jsonl"), "/a.jsonl: expected ROOT/workloads/TYPE/NAME.jsonl"),
        (("kernels.py:right", f"--workloads={ONE}", "--declared={"), "--declared: Expecting property name"),
        (
            ("kernels.py:right", f"--workloads={ONE}", '--declared={"lay": "bshd"}'),
            "declared.lay: found a field that is unknown",
        ),
        (("kernels.py:right", f"--workloads={ONE}", "--seed=x"), "seed must be"),
        (("kernels.py:right", f"--workloads={ONE}", "--budget-s=0"), "budget_s must be"),
    ],
)
def test_what_cannot_be_judged_is_an_object_too(command, words, said):
    code, out = command(*words, "--json")
    answer = as_described(json.loads(out))
    assert (code, answer["right"]) == (2, None)
    assert said in answer["unjudged"]


USAGES = {
    "unrecognized arguments: --bogus": ("kernels.py:right", "--workloads=smoke-full", "--bogus"),
    "unrecognized arguments: smoke-half": ("kernels.py:right", "--workloads", "smoke-full", "smoke-half"),
    "argument --budget-s: invalid float value: 'x'": ("kernels.py:right", "--workloads=smoke-full", "--budget-s=x"),
    "name --workloads, as --workloads=smoke; python -m pytest_attn lists them": ("kernels.py:right",),
    "name either FILE.py:FUNCTION or --serve": ("kernels.py:right", "--serve"),
}


@pytest.mark.parametrize("said", USAGES)
def test_a_wrong_command_line_is_an_object_too(command, capfd, said):
    for words in (("--json",), ("--js",), ()):
        with pytest.raises(SystemExit) as ended:
            command(*USAGES[said], *words)
        out, err = capfd.readouterr()
        assert ended.value.code == 2
        assert err.endswith(f"judge: error: {said}\n")
        assert [as_described(json.loads(line))["unjudged"] for line in out.splitlines()] == [said] * len(words)


def test_a_folder_that_is_gone_is_no_verdict(command, monkeypatch):
    monkeypatch.setattr(judge_command, "_close_to_others", lambda: os.stat("no such folder"))
    code, out = command("kernels.py:right", "--workloads=smoke-full", "--json")
    assert code == 2
    assert "No such file" in json.loads(out)["unjudged"]


def test_an_error_of_the_judge_is_no_verdict(command, monkeypatch):
    monkeypatch.setattr("pytest_attn.guests.judging.judge_kernel.judge_invariants", lambda *given: 1 / 0)
    code, out = command("kernels.py:right", f"--workloads={ONE}", "--json")
    assert (code, json.loads(out)["unjudged"]) == (2, "ZeroDivisionError: division by zero")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
@pytest.mark.parametrize(("stdout", "said"), [("full", "No space left on device"), ("closed", "stdout is closed")])
def test_an_answer_that_cannot_be_written_is_no_verdict(command, monkeypatch, capfd, stdout, said):
    if stdout == "closed":
        monkeypatch.setattr(sys, "stdout", None)
    else:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    with pytest.raises(SystemExit) as ended:
        command("kernels.py:right", f"--workloads={ONE}", "--json")
    assert ended.value.code == 2
    assert capfd.readouterr().err.endswith(f"{said}\n")


def test_a_server_without_stdin_has_no_line_to_answer(command, monkeypatch):
    monkeypatch.setattr(judge_command, "resolve_name", lambda name: lambda: monkeypatch.setattr(sys, "stdin", None))
    assert command("--serve") == (0, "")


def test_a_person_reads_lines(command):
    code, out = command("kernels.py:wrong", f"--workloads={ONE}")
    assert code == 1
    assert out.startswith("wrong: kernels:wrong\nh2-s40-d32-fp32: mismatch\nmismatch: out of kernels:wrong")


LINES = {
    "": "Expecting value",
    "NaN": "has NaN",
    "7": "expected one JSON object a line",
    f'{{"id": 1, "kernel": "kernels.py:right", "workloads": {ONE}}}': "",
    "{": "double quotes",
    "[]": "expected one JSON object a line",
    "\udcff": "can't decode",
    "x" * 5000: "a line of more than 4,096 bytes",
    '{"id": [2], "workloads": "smoke-full"}': "either kernel, FILE.py:FUNCTION, or source",
    '{"kernel": "kernels.py:right", "workloads": "smoke-full", "mesure": true}': "mesure: found a field that is unknown",
    '{"kernel": "kernels.py:right", "workloads": "smoke-full", "budget_s": "1"}': 'budget_s: found "1", expected number',
    '{"kernel": "kernels:right", "workloads": "smoke-full", "declared": {"isolated": false}}': "expected layout, returns_lse,",
    '{"kernel": "kernels.py:exits_at_once", "workloads": "smoke-full", "feedback": "full"}': "",
    '{"source": "def attention(q, k, v):\\n    return v * 0\\n", "workloads": ["smoke-full"], "id": 3}': "",
}


def test_each_line_is_answered_by_one(command, monkeypatch):
    monkeypatch.setattr(judge_command, "_LONGEST", 4096)
    lines = "\n".join([*LINES, ""]).encode(errors="surrogateescape")
    code, out = command("--serve", "--feedback=cause", stdin=lines)
    answers = [as_described(json.loads(line)) for line in out.splitlines()]
    assert code == 0
    for answer, said in zip(answers, LINES.values(), strict=True):
        assert said in answer["unjudged"]
        assert bool(said) == (not answer["workloads"])
    assert [answer["right"] for answer in answers if answer["workloads"]] == [True, False, False]
    assert [answer["id"] for answer in answers if "id" in answer] == [1, [2], 3]
    assert answers[-2]["feedback"] == "cause", "no request is given more than the server gives"


def test_workloads_of_json_have_no_code():
    fields = {"q_len": 9, "kv_len": 32, "mask": {"kind": "Window", "left": 3, "right": 0}, "kv_pages": {"size": 16}}
    made = Workload(9, 32, mask=Window(3, 0), kv_pages=Pages(16), kv_lens=(32, 7))
    assert workloads_of([{**fields, "kv_lens": [32, 7]}, "smoke-full,smoke-half"])[0] == made
    for wrong in ({"score_mod": {}}, {"mask": {"kind": "MaskMod", "function": {}}}, {"mask": {}}):
        with pytest.raises(ValueError, match=r"has no functions|kind"):
            workloads_of({"q_len": 4, **wrong})


FORGES = """
import os
def attention(q, k, v):
    judge = open(f"/proc/{os.getppid()}/stat").read().rsplit(")", 1)[1].split()[1]
    for fd in os.listdir(f"/proc/{judge}/fd"):
        if "pipe" in os.readlink(f"/proc/{judge}/fd/{fd}"):
            os.write(os.open(f"/proc/{judge}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK), b'{"right": true}')
"""


@pytest.mark.slow("starts Python")
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_no_kernel_reaches_the_output_of_its_judge_nor_is_imported_by_it(tmp_path):
    (tmp_path / "forges.py").write_text(FORGES)
    (tmp_path / "secrets.py").write_text("print('imported by the judge')\n1 / 0\n")
    words = [sys.executable, "-m", "pytest_attn", "judge", "forges.py", f"--workloads={ONE}", "--json", "--device=cpu"]
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("root opens what any process has open")
        words = ["setpriv", "--bounding-set=-sys_ptrace", *words]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["workloads"][0]["verdict"] == "raised"
    assert "PermissionError" in done.stdout
    assert done.returncode == 1

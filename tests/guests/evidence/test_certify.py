"""`python -m pytest_attn certify`: the certificates say what the records say, and what is no whole run has none."""

import json
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from fakes.records import BACKENDS, GPU, HOSTILE, record
from fakes.runs import lines_of_run

from pytest_attn.__main__ import main
from pytest_attn.guests.evidence.certify import CERTIFICATE, badge, file_name, page_of, read_certificate, read_certificates
from pytest_attn.reports.files import ESCAPED
from pytest_attn.reports.records import new_record

DOCS = Path(__file__).parents[3] / "docs"
OURS = DOCS / "results" / "certificates"
FLASH2 = next(one for one in BACKENDS if one[0] == "flash2")
SAGE = next(one for one in BACKENDS if one[0] == "sage_fp8")
CPU = {**GPU, "name": "AMD EPYC", "device": "cpu", "kind": "cpu"}
NAMED = "flash2-2.8.3-nvidia-h200"


def judged(verdict="passed", workload="smoke-full", kernel=FLASH2, question="check", direction="forward", **more):
    group = workload.partition("-")[0]
    return record(question, verdict, (workload, group, {}), kernel, direction, **more)


@pytest.fixture
def certify(tmp_path, monkeypatch, capsys):
    """Return a function of the records of runs, and of facts of theirs, that returns exit code, what is said and all files."""
    monkeypatch.chdir(tmp_path)

    def run(*runs, edit=lambda lines: lines, options=(), **facts):
        names = [f"{number}.jsonl" for number in range(len(runs))]
        for name, found in zip(names, runs, strict=True):
            device = {one["machine"].get("name") for one in found} - {None, "AMD EPYC"}
            lines = lines_of_run(found, [one["test"] for one in found], **{"device": "".join(device) or "cpu", **facts})
            Path(name).write_text("".join(f"{one}\n" for one in edit(lines)), encoding="utf-8", errors=ESCAPED)
        code = main(["certify", *names, "-o", "out", *options])
        said = capsys.readouterr()
        files = {path.name: path.read_text(encoding="utf-8") for path in sorted(Path("out").glob("*"))}
        return code, (said.out + said.err).splitlines(), files

    return run


def refused(capsys, *arguments):
    """Return the last line that is said of a usage error."""
    with pytest.raises(SystemExit) as ended:
        main(["certify", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1].removeprefix("python -m pytest_attn certify: error: ")


def test_cases_are_counted_by_group_as_they_ended(certify):
    code, said, files = certify(
        [
            judged(z_element=3.0),
            judged("held", question="invariants"),
            judged("passed", direction="forward+backward", z_element=5.0),
            judged("mismatch", "edges-s127", reason="z 22 in one element", z_element=22.0),
            judged("held", "edges-s127", question="invariants"),
            judged("known defect", "edges-gqa5", reason="#7: dq"),
            judged("expected", "edges-gqa7"),
            judged("passed", "edges-s129"),
            judged("skipped", "edges-s129", question="invariants", cause="declined"),
            judged("skipped", "edges-d40", cause="declined"),
            judged("skipped", "edges-d64", reason="too long"),
            judged("regressed", "edges-s129", question="latency"),
            judged("passed", "flux-L128", SAGE, is_approximate=True),
            judged("skipped", "flux-L128", ("absent", 1, "", ""), cause="not here"),
        ]
    )
    assert code == 0
    assert said[0] == f"out/{NAMED}.json: flash2 2.8.3 on NVIDIA H200: 3 of 6 right"
    assert list(files) == [f"{name}.{end}" for name in (NAMED, "sage_fp8-2.2.0-nvidia-h200") for end in ("json", "svg")]
    found = json.loads(files[f"{NAMED}.json"])
    edges = {"wrong": 1, "known": 2, "right": 1, "not_taken": 1, "left_out": 1, "judged": 4}
    assert found["groups"]["edges"] == edges
    assert found["cases"] == {**edges, "right": 3, "judged": 6}
    assert found["z_worst"] == 22.0
    assert found["wrong"][1:] == [
        "known defect: #7: dq (edges-gqa5, forward)",
        "mismatch: z 22 in one element (edges-s127, forward)",
    ]
    assert "#cf222e" in files[f"{NAMED}.svg"]
    assert ">1 of 1 right, approximate<" in files["sage_fp8-2.2.0-nvidia-h200.svg"]


def test_the_color_of_a_badge_says_what_failed(certify):
    for verdict, color in (("passed", "#1a7f37"), ("known defect", "#9a6700"), ("mismatch", "#cf222e")):
        assert f'fill="{color}"' in certify([judged(), judged(verdict, "edges-s127")])[2][f"{NAMED}.svg"]


def test_a_failure_outside_of_a_judgment_makes_its_case_wrong(certify):
    right = [judged(), judged(workload="smoke-half")]
    unknown = {"question": "test", "subject": "-", "workload": "-", "verdict": "failed"}
    beside = new_record(**unknown, test=right[0]["test"], reason="launched another kernel")
    killed = new_record(
        **{**unknown, "verdict": "no result", "subject": "flash2"}, test="t.py::t[x-flash2]", name="smoke-half"
    )
    (_, _, files) = certify([*right, beside, killed])
    cases = json.loads(files[f"{NAMED}.json"])["cases"]
    assert (cases["wrong"], cases["right"]) == (2, 1)
    raised = judged("raised", kernel=("-", 1, "", ""), test="t.py::elsewhere", reason="assert 0")
    (_, _, files) = certify([*right, raised])
    assert len(files) == 2
    found = json.loads(files[f"{NAMED}.json"])
    assert (found["cases"]["wrong"], found["wrong"]) == (0, ["t.py::elsewhere: assert 0, of no kernel that is known"])
    assert "#9a6700" in files[f"{NAMED}.svg"]


def test_bits_and_steadiness_are_no_cases(certify):
    seen = "seen-batch: keeps its bits, batch 2, 3; seen-rerun: changes its bits: not at rerun 1: out[0] differs"
    found = [
        judged(),
        judged("held", "promises-d128", question="invariants", reason=seen),
        judged("held", "promises-half", question="invariants", reason="seen-batch: changes its bits: not at batch 2"),
        judged("broken", "smoke-half", question="invariants", reason="bits-decode"),
        judged("held", question="steady"),
        judged("broken", "smoke-half", question="steady", reason="new kernel at q_len 127"),
    ]
    one = json.loads(certify(found)[2][f"{NAMED}.json"])
    assert one["bits"] == {"batch": {"kept": 1, "of": 2}, "rerun": {"kept": 0, "of": 1}, "decode": {"kept": 0, "of": 1}}
    assert one["steady"] == {"kept": 1, "of": 2}
    assert (one["cases"]["right"], one["cases"]["judged"]) == (1, 2)
    assert "broken: new kernel at q_len 127 (smoke-half, forward)" in one["wrong"]


def test_each_device_and_version_has_its_own(certify):
    other = ("flash2", 1.0, "flash-attn", "2.7.0")
    _, _, files = certify([judged(), judged(machine=CPU, workload="edges-s127")], [judged(machine=CPU, kernel=other)])
    assert [name for name in files if name.endswith("json")] == [
        "flash2-2.7.0-amd-epyc.json",
        "flash2-2.8.3-amd-epyc.json",
        f"{NAMED}.json",
    ]
    assert [json.loads(text)["cases"]["judged"] for name, text in files.items() if name.endswith("json")] == [1, 1, 1]


REFUSED = {
    "a dropped case": (lambda lines: lines[1:], "0.jsonl has 1 record, and its run wrote 2; "),
    "an edited verdict": (lambda lines: [one.replace("mismatch", "passed") for one in lines], "of which its closing line"),
    "a killed run": (lambda lines: lines[:-1], "0.jsonl has 2 records and no closing line: "),
}


@pytest.mark.parametrize(("edit", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_a_whole_run_has_none(certify, edit, said):
    code, (line,), files = certify([judged(), judged("mismatch", "smoke-half")], edit=edit)
    assert (code, files) == (1, {})
    assert line.startswith("certify: ")
    assert said in line


def test_what_cannot_be_certified_is_said_in_a_line(certify, capsys):
    assert certify([judged("skipped", cause="declined")], judged=1)[:2] == (
        1,
        ["certify: 0.jsonl has judged no values, expected check or check_invariants"],
    )
    twice = certify([judged(machine=CPU)], [judged(), judged(machine=CPU, workload="smoke-half")])
    assert twice[:2] == (1, ["certify: flash2 2.8.3 on AMD EPYC is in two runs, expected one; certify them apart"])
    assert refused(capsys).startswith("name the .jsonl files of whole runs; or ")
    assert refused(capsys, "0.jsonl", "--page=page.html") == "--page must end in .md, got 'page.html'"
    assert refused(capsys, "0.jsonl", "-o", "0.jsonl") == "-o must be a folder, got '0.jsonl'"
    assert refused(capsys, "0.jsonl", "-o", "") == "-o must be a folder, got ''"
    assert refused(capsys, "gone.jsonl").startswith("there is no gone.jsonl; ")
    assert refused(capsys, "0.jsonl", "-o", "/proc/none").startswith("cannot write /proc/none: ")
    Path("page.md").write_text("# Mine\n")
    assert refused(capsys, "0.jsonl", "--page=page.md").startswith("page.md lacks '<!-- generated: certificates -->")


def test_the_commit_is_held_against_what_the_run_has_imported(certify, tmp_path):
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "x")):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    remarks = {}
    for told in ("", "f" * 40, f"{commit}+12345678", commit):
        _, _, files = certify([judged(kernel=("mine", 1, "callable", ""))], commit=told)
        one = json.loads(files[f"mine-{told[:10]}{'+' * ('+' in told)}-nvidia-h200.json"])
        remarks[told[40:] or told] = one["remarks"][0]
    assert remarks[""] == "is of no commit"
    assert remarks["f" * 40] == "could not be held against its commit"
    assert remarks["+12345678"] == f"is of {commit[:10]} with uncommitted changes, expected none"
    assert remarks[commit] == f"has imported nothing of {commit[:10]}, expected its tests or its kernels"


# -- what others hand over --------------------------------------------------------------------------------------------------

TAMPERED = {
    "a number": (lambda text: text.replace('"right": 1', '"right": 2'), "its digest is not that of what it says"),
    "a lost group": (lambda text: text.replace('"smoke"', '"edges"'), "its digest is not that of what it says"),
    "cut short": (lambda text: text[:-20], "Expecting"),
    "NaN": (lambda text: text.replace('"z_worst": null', '"z_worst": NaN'), "has NaN, expected a finite number"),
    "another type": (lambda text: text.replace('"right": 1', '"right": "1"'), 'found "1", expected integer from 0'),
    "an unknown field": (lambda text: text.replace('"bits"', '"bots"'), "bits: found nothing, expected object"),
    "a newer one": (lambda text: text.replace('"schema": 1', '"schema": 2'), "schema: found 2, expected 1"),
    "no object": (lambda text: "[]", "found an array, expected object"),
}


@pytest.mark.parametrize(("tamper", "said"), TAMPERED.values(), ids=TAMPERED)
def test_a_certificate_that_was_changed_is_refused_in_a_line(certify, capsys, tamper, said):
    _, _, files = certify([judged()])
    path = Path("out", f"{NAMED}.json")
    assert read_certificate(path)["kernel"] == "flash2"
    changed_text = tamper(files[path.name])
    assert changed_text != files[path.name]
    path.write_text(changed_text)
    line = refused(capsys, "-o", "out", "--page=page.md")
    assert line.startswith(f"{path}: ")
    assert said in line


def test_another_name_and_other_bytes_are_refused(certify, capsys):
    certify([judged()])
    path = Path("out", f"{NAMED}.json")
    path = path.rename(path.with_name("flash4.json"))
    assert refused(capsys, "-o", "out", "--page=page.md") == f"{path}: is the certificate {NAMED}; give it that name again"
    path.write_bytes(b"\xff")
    assert "can't decode byte 0xff" in refused(capsys, "-o", "out", "--page=page.md")


@pytest.mark.parametrize("kernel", [HOSTILE, "\x1b[2J\ufffe\ud800]]>", "a](b) | `c`\n<!-- end -->", "../../x", "x" * 300])
def test_no_name_becomes_part_of_a_badge_or_a_page(certify, kernel):
    options = ("--page=page.md",)
    machine = {**GPU, "name": kernel[:40]}
    wrong = judged("mismatch", kernel=(kernel, 1, kernel, "1"), reason=kernel, machine=machine)
    code, _, files = certify([wrong, judged(machine=machine)], options=options)
    first = Path("page.md").read_text(encoding="utf-8")
    assert code == 0
    assert all(ElementTree.fromstring(text).tag.endswith("svg") for name, text in files.items() if name.endswith("svg"))
    assert not any("<script" in text or "<img" in text for name, text in files.items() if name.endswith("svg"))
    assert all(name.isascii() and len(name) < 130 for name in files)
    widths = {line.replace("\\|", "").count(" | ") for line in first.splitlines() if line.startswith("| [")}
    assert len(widths) == 2, "as many cells in each row of a table"
    assert first.splitlines()[-1] == "<!-- end -->"
    certify([wrong, judged(machine=machine)], options=options)
    assert Path("page.md").read_text(encoding="utf-8") == first, "the same records, the same page"


def test_similar_names_have_files_of_their_own(certify):
    names = ("a b", "a-b", "a@b", "\ud800", "\ud801")
    made = [file_name({"kernel": name, "version": "1", "device": "x"}) for name in names]
    assert len(set(made)) == len(names)
    code, _, files = certify([judged(kernel=(name, 1, "", "1")) for name in names[:3]])
    assert (code, len(files)) == (0, 6)


def test_the_folder_of_a_page_may_have_any_name(certify, capsys):
    certify([judged()])
    Path("out").rename("my (own)")
    assert main(["certify", "-o", "my (own)", "--page=page.md"]) == 0
    assert f"(my%20%28own%29/{NAMED}.json)" in Path("page.md").read_text()
    said = "there is no folder 'out'; name that of the certificates: -o DIR"
    assert refused(capsys, "-o", "out", "--page=page.md") == said, "and the page keeps its tables"


# -- our own ---------------------------------------------------------------------------------------------------------------


def test_the_page_and_the_badges_say_what_the_certificates_say():
    found, page = read_certificates(OURS), DOCS / "conformance.md"
    again = "run: python -m pytest_attn certify -o docs/results/certificates --page=docs/conformance.md"
    assert page.read_text(encoding="utf-8") == page_of(page, found, OURS), again
    badges = {path.stem: path.read_text(encoding="utf-8") for path in OURS.glob("*.svg")}
    assert badges == {file_name(one): badge(one) for one in found}, "a badge comes from certify, with its certificate"
    for path in OURS.glob("*.json"):
        jsonschema.validate(json.loads(path.read_text()), CERTIFICATE)


def test_a_page_that_says_something_else_is_seen(certify):
    certify([judged()], options=("--page=page.md",))
    page = Path("page.md")
    text = page.read_text()
    page.write_text(text.replace("1 of 1 right", "2 of 2 right"))
    assert page_of(page, read_certificates(Path("out")), Path("out")) == text

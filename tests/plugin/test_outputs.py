"""The files of a run, by --attn-output, and what a job of GitHub Actions gets."""

import html
import json

import pytest
import vl_convert  # noqa: F401  # its extension cannot be loaded a second time by a run in this process

from pytest_attn.reports.records import fields, read_records

TESTS = """
    import pytest
    import torch

    def right(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    @pytest.mark.attention("smoke-full", "smoke-half")
    def test_right(attn):
        attn.check(right)

    @pytest.mark.attention("smoke-full", backward=True)
    def test_wrong(attn):
        attn.check(lambda q, k, v: right(q / 2, k, v))

    @pytest.mark.attention("smoke-full")
    def test_raises(attn):
        raise RuntimeError("\\nno kernel")

    @pytest.mark.attention("smoke-full")
    def test_backends(attn, attn_backend):
        attn.check(attn_backend)

    @pytest.mark.attention("smoke-full")
    def test_rules(attn):
        attn.check_invariants(right, only="leak")
"""
OPTIONS = ("--attn-backends=math", "-p", "no:cacheprovider")


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)])
def test_a_line_for_each_judgment_with_every_field(pytester, workers):
    pytester.makepyfile(TESTS)
    start = pytester.runpytest_subprocess if workers else pytester.runpytest_inprocess
    result = start("--attn-output=run.jsonl", "--attn-output=run.md", *OPTIONS, *workers)
    result.assert_outcomes(passed=4, failed=2)
    assert "::error" not in result.stdout.str(), "as in a job of GitHub Actions alone"
    assert all(one in (pytester.path / "run.md").read_text() for one in ("### Wrong", "| mismatch |", "| raised |"))
    records = {(r["test"].partition("::")[2], r["question"]): r for r in read_records(pytester.path / "run.jsonl")}
    assert len(records) == 6
    for record in records.values():
        assert list(record) == list(fields())
    right = records["test_right[smoke-full]", "check"]
    assert (right["verdict"], right["subject"], right["tags"]["family"]) == ("passed", "right", "callable")
    assert right["shape"]["flops"]["backward"] == 2.5 * right["shape"]["flops"]["forward"]
    assert {t["name"] for t in right["tensors"]} == {"out"}
    wrong = records["test_wrong[smoke-full]", "check"]
    assert (wrong["verdict"], wrong["direction"]) == ("mismatch", "forward+backward")
    assert {t["name"] for t in wrong["tensors"]} == {"out", "dq", "dk", "dv"}
    assert wrong["command"].startswith("pytest 'test_a_line_for_each_judgment_with_every_field.py::test_wrong[smoke-full]'")
    assert wrong["line"] == 11
    assert (list(wrong["faults"]), list(right["faults"])) == (["scale-wrong"], [])
    assert records["test_raises[smoke-full]", "check"]["reason"] == "RuntimeError: no kernel"
    math = records["test_backends[smoke-full-math]", "check"]
    assert math["tags"] == {"family": "torch", "backend": "math", "compile": "none"}
    assert math["version"]
    assert records["test_rules[smoke-full]", "invariants"]["verdict"] == "held"


def test_aliases_name_the_same_workload(pytester):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.attention("cuda_attn_L128_bfloat16", device="cpu")
        def test_it(attn):
            pytest.skip("only its name is asked for")
        """)
    pytester.makeconftest("""
        import pytest
        from pytest_attn.cases.case_records import facts_of
        from pytest_attn.session.session import SESSION

        def pytest_collection_finish(session):
            attention = session.config.stash[SESSION]
            (workload,) = attention.registrations.catalog.select("flux-L128")
            print(facts_of(attention, workload, "sdpa", "cpu"))
        """)
    result = pytester.runpytest_inprocess("-s", *OPTIONS)
    result.stdout.fnmatch_lines(["*'group': 'flux', 'aliases': ('cuda_attn_L128_bfloat16',)*"])


def test_what_a_failure_says_is_the_same_in_every_output(pytester, monkeypatch):
    """In the terminal, the record, the page, Markdown, annotations and JUnit: each line, and one z."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "step.md"))
    pytester.makepyfile("""
import html
import json

import pytest
import vl_convert  # noqa: F401  # its extension cannot be loaded a second time by a run in this process
from pytest_attn import Workload
from torch.nn.functional import scaled_dot_product_attention as sdpa

@pytest.mark.attention(Workload(64, heads=4, kv_heads=2, head_dim=32, name="decoder"), device="cpu", backward=True)
def test_it(attn):
    attn.check(lambda q, k, v: sdpa(q, k, v, scale=0.13, enable_gqa=True), name="mine")
""")
    outputs = [f"--attn-output=run.{suffix}" for suffix in ("jsonl", "html", "md")]
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *outputs, "--junitxml=run.xml", "-v")
    said = [
        line.removeprefix("E       AssertionError: ").removeprefix("E         ")
        for line in result.outlines
        if line[:2] == "E "
    ]
    (record,) = read_records(pytester.path / "run.jsonl")
    assert [line["label"] for line in record["explanation"]][:5] == ["", "worst", "largest z", "where", "figures"]
    assert "suggests" in [line["label"] for line in record["explanation"]]
    assert said[-1] == f"reproduce  {record['command']}"
    told = [f"{line['label']:<10} {line['text']}".strip() for line in record["explanation"]]
    assert told == said[:-1]
    files = {name: (pytester.path / name).read_text(encoding="utf-8") for name in ("run.md", "step.md", "run.xml", "run.html")}
    annotations = "\n".join(line for line in result.outlines if line.startswith("::error"))
    for line in record["explanation"]:
        assert html.escape(line["text"], quote=False) in html.unescape(files["run.xml"])
        assert json.dumps(line["text"], ensure_ascii=False).replace("<", "\\u003c") in files["run.html"]
        assert line["text"] in files["run.md"]
        assert line["text"] in files["step.md"]
        assert line["text"].replace("%", "%25") in annotations
    z = f"{record['z_element']:,.0f}"
    assert f"z {z} in one element" in record["reason"]
    assert f"element {z} (limit 8" in annotations
    assert f'value="{z} ({record["tensor"]})"' in files["run.xml"]
    assert len({tensor["z_element"] for tensor in record["tensors"]}) > 1

"""Baseline files: what is written can be read, what cannot be read is never overwritten."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pytest_attn.backends.machine import Machine
from pytest_attn.latency import baseline_file as module
from pytest_attn.latency import disturbance
from pytest_attn.latency.anchors import DEFINITIONS, anchor_hashes, hash_of, make_anchors
from pytest_attn.latency.baseline_file import (
    SCHEMA,
    Baseline,
    BaselineError,
    BaselineFile,
    Identity,
    case_key,
    conditions_of,
    gpu_of,
    identify,
    orphans,
    read,
    recorded_otherwise,
)
from pytest_attn.latency.gate import FEWEST_RUNS
from pytest_attn.latency.regression import DeviceBaselines

H200 = Identity("cuda", "NVIDIA H200", 132, 140)
ANCHORS = anchor_hashes("cuda")


def find(folder, identity, anchors, protocol=1):
    return module.find(folder, identity, anchors, protocol)


def case(p50=1e-3, reason="first", date="2026-11-21", **changes):
    values = {
        "shape": "h24-s4608-d128",
        "mode": "events",
        "p50": tuple(p50 * (1 + i / 1000) for i in range(10)),
        "launch": (3e-5,) * 10,
        "anchors": {"compute": (2e-4,) * 10, "memory": (1e-4,) * 10},
        "flops": 10**12,
        "nbytes": 10**8,
        "date": date,
        "reason": reason,
        "protocol": 1,
        "version": "2.11.0",
        "memory": 1 << 20,
        "z": (2.5, 1.0, 0.8),
        "conditions": {"driver": "580", "torch": "2.11.0"},
        "gpu": "48f07d55",
    }
    return Baseline(**values | changes)


def test_what_was_written_is_read(tmp_path):
    find(tmp_path, H200, ANCHORS).write({"a": case(), "b": case(2e-3, z=None, memory=None)})
    found = find(tmp_path, H200, ANCHORS)
    assert found.path.name == "nvidia-h200.json"
    assert found.identity == H200
    assert found.cases["a"].p50 == pytest.approx(case().p50, abs=1e-10)
    assert found.cases["a"].history == (("2026-11-21", pytest.approx(1.0045e-3, rel=1e-6), "first"),)
    as_written = {"p50", "launch", "anchors", "history"}  # to a tenth of a nanosecond
    for name in vars(case()).keys() - as_written:
        assert getattr(found.cases["a"], name) == getattr(case(), name)
    assert found.cases["b"].z is None
    assert len(found.cases["a"].runs) == 10
    assert found.cases["a"].fit().sensitivity.keys() == {"compute", "memory"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([], ""),
        (["a | f | backward | warm | 1 thread", "b | f | forward | warm | 1 thread"], ""),
        (["a | f | forward | warm | 1 thread"], "recorded warm, 1 thread, this is warm, 2 threads"),
        (
            ["a | f | forward | warm | 1 thread", "a | f | forward | warm | bshd | 2 threads"],
            "recorded warm, 1 thread and warm, bshd, 2 threads, this is warm, 2 threads",
        ),
    ],
)
def test_a_case_that_was_recorded_otherwise_is_told_from_one_that_was_not(keys, words):
    assert recorded_otherwise("a | f | forward | warm | 2 threads", keys) == words


def test_a_file_that_names_no_gpu_is_read(tmp_path):
    find(tmp_path, H200, ANCHORS).write({"a": case()})
    path = tmp_path / "nvidia-h200.json"
    path.write_text(path.read_text().replace('"gpu": "48f07d55", ', ""))
    assert find(tmp_path, H200, ANCHORS).cases["a"].gpu == ""


@pytest.mark.parametrize("uuid", ["48f07d55-7a43-e2dc-10d2-1d587b01bdf1", "GPU-48f07d55-7a43-e2dc-10d2-1d587b01bdf1"])
def test_a_gpu_is_told_from_others_of_its_name(monkeypatch, uuid):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
    assert gpu_of(torch.device("cuda")) == "48f07d55"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert gpu_of(torch.device("cuda")) == ""
    assert gpu_of(torch.device("cpu")) == ""


def test_one_line_per_case_sorted_and_the_rest_untouched(tmp_path):
    find(tmp_path, H200, ANCHORS).write({"b": case(), "a": case(conditions={"torch": "2.10"}), "c": case()})
    path = tmp_path / "nvidia-h200.json"
    before = path.read_text().splitlines()
    find(tmp_path, H200, ANCHORS).write({"b": case(3e-3, reason="slower on purpose")})
    after = path.read_text().splitlines()
    assert len(before) == len(after)
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 1
    assert '"b"' in changed[0]
    assert "slower on purpose" in changed[0]
    assert [line.split('"')[1] for line in before if line.startswith('  "')] == ["a", "b", "c"]


def test_history_grows_and_starts_anew_with_another_shape_or_mode(tmp_path):
    def reasons_after(**changes):
        find(tmp_path, H200, ANCHORS).write({"a": case(**changes)})
        return [reason.partition(" (")[0] for _, _, reason in read(tmp_path / "nvidia-h200.json").cases["a"].history]

    assert reasons_after(reason="r0") == ["r0"]
    assert reasons_after(reason="r1", p50=1.01e-3) == ["r0", "r1"]
    assert reasons_after(reason="r2") == ["r0", "r1", "r2"]
    assert reasons_after(reason="shape", shape="h1-s1-d64") == ["shape"]
    assert reasons_after(reason="mode", shape="h1-s1-d64", mode="graph") == ["mode"]


def test_the_committed_file_is_read_and_written_back_as_it_is(tmp_path):
    committed = Path(__file__).parents[2] / "baselines" / "nvidia-h200.json"
    if not committed.exists():
        pytest.skip("the baselines are not in a source distribution")
    assert json.loads(committed.read_text())["schema"] == SCHEMA == 1
    found = read(committed)
    assert len(found.cases) == 370
    assert (found.identity, found.anchors) == (H200, ANCHORS)
    assert {case.protocol for case in found.cases.values()} == {3}
    assert all(len(case.runs) == FEWEST_RUNS and case.fit().variance > 0 for case in found.cases.values())
    copy = tmp_path / committed.name
    BaselineFile(copy, found.identity, found.anchors, found.cases).write({})
    assert copy.read_bytes() == committed.read_bytes()


def test_a_file_from_the_future_is_named_and_never_overwritten(tmp_path):
    file = find(tmp_path, H200, ANCHORS)
    file.write({"a": case()})
    text = file.path.read_text().replace(f'"schema": {SCHEMA}', '"schema": 99')
    file.path.write_text(text)
    words = "has schema 99, this pytest-attn knows up to 1; update pytest-attn"
    with pytest.raises(BaselineError, match=words):
        file.write({"b": case()})
    assert words in DeviceBaselines.read(tmp_path, H200, "cuda").problem
    assert file.path.read_text() == text


def test_other_anchors_are_refused(tmp_path):
    find(tmp_path, H200, ANCHORS).write({"a": case()})
    with pytest.raises(BaselineError, match="recorded beside other controls"):
        find(tmp_path, H200, {**ANCHORS, "compute": "0" * 12})


def test_times_of_another_protocol_may_have_had_other_anchors_and_stay(tmp_path):
    find(tmp_path, H200, ANCHORS).write({"a": replace(case(), protocol=2), "b": replace(case(), protocol=2)})
    others = {**ANCHORS, "compute": "0" * 12}
    find(tmp_path, H200, others, protocol=3).write({"b": replace(case(2e-3), protocol=3)})
    found = find(tmp_path, H200, others, protocol=3)
    assert {key: one.protocol for key, one in found.cases.items()} == {"a": 2, "b": 3}
    with pytest.raises(BaselineError, match="recorded beside other controls"):
        find(tmp_path, H200, ANCHORS, protocol=3)


def test_a_second_machine_of_the_name_has_a_file_of_its_own(tmp_path):
    find(tmp_path, H200, ANCHORS).write({"a": case()})
    other = Identity("cuda", "NVIDIA H200", 66, 70)
    found = find(tmp_path, other, ANCHORS)
    assert not found.cases
    assert found.path.name == "nvidia-h200-66-units-70-gib.json"
    found.write({"a": case()})
    assert find(tmp_path, other, ANCHORS).cases
    assert find(tmp_path, H200, ANCHORS).path.name == "nvidia-h200.json"


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "baselines").write_text("")
    with pytest.raises(BaselineError, match="cannot be written"):
        find(tmp_path / "baselines", H200, ANCHORS).write({"a": case()})


@pytest.mark.parametrize(
    ("name", "kind", "slug"),
    [
        ("NVIDIA H200", "cuda", "nvidia-h200"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "cuda", "nvidia-a100-sxm4-80gb-mig-3g-40gb"),
        ("AMD EPYC 9B14", "cpu", "cpu-amd-epyc-9b14-2-cores"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "cpu", "cpu-intel-xeon-2-cores"),
    ],
)
def test_machines_have_names_that_are_file_names(name, kind, slug):
    assert Identity(kind, name, 2).slug == slug


def test_every_difference_of_a_case_is_in_its_key():
    keys = {
        case_key("w", "b", "forward", "cold"),
        case_key("w2", "b", "forward", "cold"),
        case_key("w", "b2", "forward", "cold"),
        case_key("w", "b", "backward", "cold"),
        case_key("w", "b", "forward", "warm"),
        case_key("w", "b", "forward", "cold", layout="bshd"),
        case_key("w", "b", "forward", "cold", threads=1),
        case_key("w", "b", "forward", "cold", threads=2),
    }
    assert len(keys) == 8


def test_this_machine_is_identified():
    device = torch.device("cpu")
    identity = identify(device, Machine("cpu", "Some CPU", None, "cpu", 1, 0, torch.__version__))
    assert identity.name == "Some CPU"
    assert identity.units >= 1
    found = conditions_of(device)
    assert found["torch"] == torch.__version__
    assert all(isinstance(value, str) for value in found.values())


def test_the_anchors_are_frozen():
    """Who changes an anchor changes every recorded time; this test is to be changed with a new version in the text."""
    assert anchor_hashes("cuda") == {"compute": "99b484f2b35d", "memory": "dfa1728ab952"}
    shared = {"compute": "2ecc9205d3f1", "memory": "b3a6a47e04d0"}
    assert anchor_hashes("cpu") == {**shared, "pace": "4a84494ec2a9", "attention": "561a2abdedf9"}
    versions = {(kind, name): text[-2:] for kind, texts in DEFINITIONS.items() for name, text in texts.items()}
    assert versions == {
        ("cuda", "compute"): "v2",
        ("cuda", "memory"): "v1",
        ("cpu", "compute"): "v1",
        ("cpu", "memory"): "v1",
        ("cpu", "pace"): "v1",
        ("cpu", "attention"): "v1",
    }


def test_the_anchors_do_what_their_definition_says():
    anchors = make_anchors(torch.device("cpu"))
    product = anchors["compute"].call()
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(384, 384, generator=generator) for _ in range(2))
    assert torch.allclose(product, a @ b, atol=1e-3)
    assert anchors["memory"].call().nbytes == 33554432
    assert hash_of(anchors["compute"].definition) == anchor_hashes("cpu")["compute"]
    assert anchors["compute"].definition == DEFINITIONS["cpu"]["compute"]
    assert range(6000) == disturbance._LOOP


def test_another_shape_under_another_id_is_not_named(tmp_path):
    file = find(tmp_path, H200, ANCHORS)
    file.write({"old.py::test_a | mine | forward | cold": case()})
    assert module.recorded_elsewhere("new.py::test_b | mine | forward | cold", "another", file, tmp_path) == ""


def test_lines_of_tests_that_are_gone_are_found(tmp_path):
    (tmp_path / "test_mine.py").write_text("def test_mine(attn): ...\nclass TestIt(Inherited): ...\n")
    here = ["tiny | mine of test_mine.py::test_mine[tiny] | forward", "tiny | mine of test_mine.py::TestIt::test_it | forward"]
    gone = [
        "tiny | mine of test_mine.py::test_min | forward",
        "tiny | mine of test_old.py::TestIt::test_it | forward",
    ]
    assert orphans([*here, "tiny | sdpa | forward | warm", *gone], tmp_path) == gone


def test_an_accepted_change_has_its_percentage_in_the_reason(tmp_path):
    file = find(tmp_path, H200, ANCHORS)
    file.write({"a": case()})
    slower = case()
    file.write({"a": replace(slower, p50=tuple(2 * time for time in slower.p50), reason="it does more")})
    assert read(file.path).cases["a"].reason == read(file.path).cases["a"].history[-1][2] == "it does more (+100.0%)"

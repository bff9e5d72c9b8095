"""What a saved failure is made of: names, folders, workloads as JSON, tensors, and the judgment on what was saved."""

import contextlib
import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutations import MUTATED, mutated, read_or_refused, require_one_judgment

from pytest_attn import BooleanMask, Document, Neighborhood, Pages, Window, Workload, draw_inputs
from pytest_attn.backends.precision import Precision, Threshold, precision_named
from pytest_attn.backends.registry import Registry
from pytest_attn.cases.case_records import RECORDS
from pytest_attn.cases.judgment import FailureEvidence
from pytest_attn.correctness import spec as references_module
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.mismatch_text import describe
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.guests.saving import saved_failure as failure_module
from pytest_attn.guests.saving import saving_run as folder_module
from pytest_attn.guests.saving.saved_failure import (
    ENVIRONMENT,
    FAILURE,
    TENSORS,
    FailureData,
    load_failure,
    tensors_of,
    write_tensors,
)
from pytest_attn.guests.saving.saving_run import (
    FailureSaver,
    KernelSource,
    NoSpaceError,
    import_root,
    kernel_of,
    require_space,
    safe_name,
    script,
    write_folder,
)
from pytest_attn.reports.records import new_record
from pytest_attn.session.devices import Machines
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.functions import UnknownFunctionError
from pytest_attn.workloads.source import decode_workload, encode_workload

CPU = torch.device("cpu")
CATALOG = [entry.workload for entry in builtin_catalog()]


def right(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def on_module_level(q, k, v):
    return torch.zeros_like(q)


# -- names and folders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        "tests/sub/test_a.py::TestIt::test_b[flux-L512-sdpa+compile]",
        "test_a.py::test_b[hub:kernels-community/flash-attn3@v1]",
        'test_a.py::test_b[a"b<c>|?*\\ d\n\x00é]',
        "../../test_a.py::test_b[" + "x" * 5000 + "]",
        "con.py::aux",
        "::",
    ],
)
def test_a_name_is_safe_on_every_file_system(case):
    name = safe_name(case)
    assert re.fullmatch(r"[A-Za-z0-9._+=-]+", name)
    assert not name.startswith(("-", ".")) or case == "::"
    assert not name.endswith((".", " "))
    assert len(name) <= 110
    assert name.partition(".")[0].lower() not in ("con", "aux", "nul", "prn")


def test_names_of_different_cases_differ_even_where_case_does_not_count():
    cases = [
        "t.py::a[X]",
        "t.py::a[x]",
        "t.py::a[x/y]",
        "t.py::a[x:y]",
        "t.py::a[" + "x" * 300 + "]",
        "t.py::a[" + "x" * 301 + "]",
    ]
    assert len({safe_name(case).lower() for case in cases}) == len(cases)
    assert safe_name(cases[0]) == safe_name(cases[0])
    assert safe_name("tests/test_a.py::test_b[flux-L512]").startswith("tests-test_a-test_b-flux-L512-")


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "case"
    write_folder(target, lambda folder: (folder / "a").write_text("first"))

    def fail(folder):
        (folder / "a").write_text("second")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_folder(target, fail)
    assert (target / "a").read_text() == "first"
    write_folder(target, lambda folder: (folder / "b").write_text("third"))
    assert [path.name for path in target.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["case"]


def test_a_folder_that_another_process_writes_meanwhile_is_replaced(tmp_path):
    target = tmp_path / "case"

    def write(folder):
        target.mkdir()
        (target / "theirs").touch()
        (folder / "ours").touch()

    write_folder(target, write)
    assert [path.name for path in tmp_path.rglob("*")] == ["case", "ours"]


def test_space_is_looked_at_first(tmp_path, monkeypatch):
    require_space(tmp_path, 1000)
    monkeypatch.setattr(folder_module.shutil, "disk_usage", lambda path: shutil_usage(free=3 << 30))
    require_space(tmp_path, 2 << 30)
    with pytest.raises(NoSpaceError, match=re.escape(f"3.0 GiB are needed in {tmp_path}, 3.0 GiB are free")):
        require_space(tmp_path, 3 << 30)


def shutil_usage(free):
    return folder_module.shutil._ntuple_diskusage(1 << 40, 0, free)


# -- workloads -------------------------------------------------------------------------------------------------------------


def through_json(workload, mask=None):
    return decode_workload(json.loads(json.dumps(encode_workload(workload))), mask)


@pytest.mark.parametrize("workload", CATALOG, ids=lambda w: w.id)
def test_every_workload_of_the_catalog_comes_back(workload):
    assert through_json(workload) == workload


@pytest.mark.parametrize(
    "workload",
    [
        Workload(8, mask=Window(3, None), softcap=2.5, scale=0.1, bias="hk", alibi=True, name="own"),
        Workload(12, mask=Document((5, 7), causal=True), dtype="float16"),
        Workload(12, mask=Neighborhood((3, 4), (2, 3), stride=(1, 2), causal=(True, False))),
        Workload(heads=4, kv_heads=2, q_lens=(3, 0, 5), kv_lens=(2, 4, 4)),
        Workload(1, 40, batch=2, kv_pages=16, kv_lens=(40, 3), sinks=True, head_dim=8, v_head_dim=16),
        Workload(q_lens=(3, 5), cached=(20, 0), kv_pages=Pages(4, "HND", fused=True, pool=20)),
        Workload(3, kv_lens=(8, 3), pad="left"),
    ],
    ids=lambda w: w.id,
)
def test_every_field_comes_back(workload):
    assert through_json(workload) == workload


def test_a_mask_whose_function_cannot_be_imported_comes_back_as_its_tensor():
    near = Workload(16, heads=2, mask=lambda b, h, q, kv: (q - kv).abs() <= 2 + h)
    inputs = draw_inputs(near)
    mask = tensors_of(FailureData("structured", inputs))["mask"]
    back = through_json(near, mask)
    assert back.id == near.id
    assert isinstance(back.mask, BooleanMask)
    at = torch.meshgrid(*(torch.arange(n) for n in (1, 2, 16, 16)), indexing="ij")
    assert torch.equal(dataclasses.replace(inputs, workload=back).mask_mod()(*at), inputs.mask_mod()(*at))
    with pytest.raises(UnknownFunctionError, match=rf"lambda-\w+ of {__name__} cannot be imported here"):
        through_json(near)


def test_another_function_of_the_same_name_is_not_taken_for_it():
    encoded = encode_workload(next(w for w in CATALOG if w.name == "features-mod"))
    encoded["score_mod"]["name"] = "_prefix_lm"
    with pytest.raises(UnknownFunctionError):
        decode_workload(encoded)
    encoded["score_mod"] |= {"module": "os", "name": "system", "label": "system"}
    with pytest.raises(UnknownFunctionError):  # no function of Python's
        decode_workload(encoded)


# -- tensors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "bool"]
)
def test_tensors_of_every_dtype_and_stride_come_back(tmp_path, dtype):
    whole = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype))
    given = {"whole": whole, "turned": whole.transpose(0, 2), "part": whole[:, 1], "same": whole, "none": whole[:0]}
    given["spread"] = whole[:1].expand(5, 3, 4)
    write_tensors(tmp_path / TENSORS, given, "title")
    found = failure_module._tensors_in(tmp_path)
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float())


# -- the judgment ---------------------------------------------------------------------------------------------------------


def save(folder, spec, target=on_module_level):
    """Save what `judge` finds, as a run would, and return its message."""
    settings = SimpleNamespace(thorough=False, more={"save_failures": str(folder)})
    session = SimpleNamespace(settings=settings, machines=Machines("cpu"), references=ReferenceCache(), rootpath=folder)
    config = SimpleNamespace(getini=lambda name: [])
    item = SimpleNamespace(nodeid="test_x.py::test_y[z]", listchain=list, stash={RECORDS: [new_record()]}, config=config)
    subject = spec.subject(Registry(), target)
    comparison = judge(subject, spec, ReferenceCache())
    evidence = FailureEvidence(spec, subject, comparison)
    message = f"{describe(comparison)}\n  reproduce  pytest test_x.py"
    context = SimpleNamespace(session=session, item=item, executor=SimpleNamespace(unnamed_because=None))
    saved = FailureSaver(context, evidence, message, "pytest test_x.py").save(10)
    assert saved.startswith("  saved      "), saved
    (found,) = folder.iterdir()
    return load_failure(found)


@pytest.mark.parametrize("name", ["smoke-packed", "smoke-paged", "smoke-padded", "edges-s704-blocks", "features-mod"])
def test_every_kind_of_workload_is_saved(tmp_path, name):
    (w,) = builtin_catalog().select(name)
    failure, given = save(tmp_path, CheckSpec(w, CPU, inputs=("randn",))), draw_inputs(w, "randn")
    for tensor in ("q", "k", "v", "bias", "cu_seqlens", "cu_seqlens_kv", "kv_lens", "page_table"):
        expected = getattr(given, tensor)
        assert (expected is None) == (tensor not in failure.tensors)
        assert expected is None or torch.equal(expected, failure.tensors[tensor])
    exact = failure.tensors["reference.out"].to(failure.tensors["q"].dtype)
    right = exact[0].transpose(0, 1) if w.is_packed else exact
    assert failure.check(lambda q, k, v: right).passed
    with pytest.raises(AssertionError, match="mismatch: out of"):
        failure.check(on_module_level)


def test_nothing_that_was_saved_is_computed_again(tmp_path, monkeypatch):
    failure = save(tmp_path, CheckSpec(Workload(32, heads=2), CPU, True), lambda q, k, v: q + k + v)

    def refuse(*arguments, **options):
        raise RuntimeError("computed again")

    for name in ("draw_inputs", "compute_reference"):
        monkeypatch.setattr(references_module, name, refuse)
    monkeypatch.setattr(failure_module, "compute_reference", refuse)
    assert failure.check(right).passed
    with pytest.raises(RuntimeError, match="computed again"):
        failure.check("eager")  # which rounds elsewhere


@pytest.mark.parametrize("name", ["flash", "mine"])
@pytest.mark.parametrize("skips", [None, Threshold(1e-3, tile=(32, 128))])
def test_a_profile_of_ones_own_is_saved_as_it_is_whatever_its_name(name, skips):
    own = Precision(name, rounds_scores=True, skips=skips)
    assert failure_module.decode_precision(json.loads(json.dumps(failure_module.encode_precision(own)))) == own
    assert failure_module.encode_precision(precision_named("flash")) == "flash"


def test_invariants_are_asked_on_the_saved_inputs(tmp_path):
    failure = save(tmp_path, CheckSpec(Workload(32, heads=2), CPU))
    failure.environment["invariants"].append("rerun")
    failure.tensors["v"].mul_(2)
    seen = []

    def watching(q, k, v):
        seen.append(v.clone())
        return right(q, k, v)

    assert failure.check(watching).passed
    assert torch.equal(seen[0], failure.tensors["v"])


def test_a_backend_that_quantizes_is_held_against_its_own_values(tmp_path, monkeypatch):
    from pytest_attn.backends.eager import Int8Dynamic

    honest = Int8Dynamic.prepare
    with monkeypatch.context() as patch:
        patch.setattr(Int8Dynamic, "prepare", lambda self, inputs, backward=False: lambda q, k, v: v * 1.5)
        failure = save(tmp_path, CheckSpec(Workload(64, heads=2), CPU), Registry()["int8_dynamic"])
        patch.setattr(failure_module, "compute_reference", None)  # nothing is computed again
        patch.setattr(references_module, "compute_reference", None)
        with pytest.raises(AssertionError) as wrong:
            failure.check("int8_dynamic")
        assert str(wrong.value) == failure.message
    assert failure.tensors["quantised.q"].dtype == torch.float32
    assert Int8Dynamic.prepare is honest
    assert failure.check("int8_dynamic").is_approximate
    assert not failure.check("math").is_approximate


def test_a_long_workload_is_judged_on_its_sampled_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("pytest_attn.correctness.reference._FULL_ELEMENTS", {"cpu": 1 << 10, "cuda": 1})
    monkeypatch.setattr("pytest_attn.correctness.reference._SAMPLED_ROWS", 64)
    failure = save(tmp_path, CheckSpec(Workload(300, heads=2), CPU, True), lambda q, k, v: q * 1.0 + k + v)
    assert failure.tensors["reference.out.rows"].numel() < 300
    monkeypatch.undo()
    assert failure.check(right).is_sampled


def test_a_score_mod_that_is_lost_leaves_the_tensors(tmp_path):
    workload = Workload(16, heads=2, score_mod=lambda s, b, h, q, kv: s * 2)
    failure = save(tmp_path, CheckSpec(workload, CPU))
    assert failure.workload is None
    assert failure.workload_id == workload.id
    assert failure.tensors["reference.out"].shape == (1, 2, 16, 64)
    with pytest.raises(ValueError, match=rf"cannot be rebuilt, only its tensors are there: lambda-\w+ of {__name__}"):
        failure.check("math")


def test_a_device_that_is_not_there_is_named(tmp_path):
    failure = save(tmp_path, CheckSpec(Workload(16), CPU))
    with pytest.raises(ValueError, match="device 'xpu' is not there; this machine has"):
        failure.check("math", device="xpu")
    assert failure.check("math", device="cpu").passed
    assert torch.equal(failure.inputs.q, failure.tensors["q"])
    assert "tensor(" not in repr(failure)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: (folder / ENVIRONMENT).unlink(),
            "is not a saved failure: No such file or directory: environment.json",
        ),
        (lambda folder: (folder / ENVIRONMENT).write_text("{"), "environment.json cannot be read"),
        (lambda folder: (folder / ENVIRONMENT).write_text('{"format": 2}'), "has format 2; this version .* reads 3"),
        (lambda folder: (folder / ENVIRONMENT).write_text("[]"), "has format None"),
        (
            lambda folder: (folder / ENVIRONMENT).write_text('{"format": 3}'),
            r"environment.json: is damaged \(sha256: found nothing, expected a checksum of 64 digits\); save it once more",
        ),
        (lambda folder: change(folder, lambda said: said["question"].update(seed=1)), "the checksum .* is of other contents"),
        (lambda folder: change(folder, lambda said: said["workload"]["fields"].clear(), True), "describes no workload"),
        (lambda folder: (folder / TENSORS).write_bytes(b"nothing"), "tensors.safetensors cannot be read"),
        (lambda folder: (folder / TENSORS).unlink(), "tensors.safetensors cannot be read"),
    ],
)
def test_a_folder_that_is_not_whole_is_a_value_error(tmp_path, spoil, message):
    folder = save(tmp_path, CheckSpec(Workload(16), CPU)).folder
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        load_failure(folder)


def change(folder, how, is_signed=False):
    """Change what is said in environment.json, with the checksum that goes with it if that is signed."""
    path = folder / ENVIRONMENT
    said = json.loads(path.read_text())
    how(said)
    if is_signed:
        said["sha256"] = failure_module.checksum(folder / TENSORS, said)
    path.write_text(json.dumps(said))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save(
        tmp_path_factory.mktemp("failures"),
        CheckSpec(Workload(16, mask=Window(3, None)), CPU, True),
        lambda q, k, v: q + k + v,
    )


@MUTATED
@given(st.data())
def test_a_mutated_failure_is_what_it_was_or_is_refused_in_one_line(whole, tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "mutated"
    shutil.copytree(whole.folder, folder, dirs_exist_ok=True)
    is_signed = data.draw(st.booleans())
    if data.draw(st.integers(0, 3)) == 0:
        kept = bytearray((folder / TENSORS).read_bytes())
        kept[data.draw(st.integers(0, len(kept) - 1))] ^= data.draw(st.integers(1, 255))
        (folder / TENSORS).write_bytes(kept)
    else:
        text = data.draw(mutated((folder / ENVIRONMENT).read_text()))
        require_one_judgment(text, FAILURE)
        (folder / ENVIRONMENT).write_text(text, encoding="utf-8", errors="surrogatepass")
    with contextlib.suppress(ValueError, TypeError):  # of what is no object any more
        change(folder, lambda said: None, is_signed)
    found, refused = read_or_refused(load_failure, folder)
    assert refused or is_signed or found.environment == whole.environment


# -- the script ------------------------------------------------------------------------------------------------------------


def test_a_script_is_python_whatever_stands_in_it():
    lines = ["import x", 'x = """']
    kernel = kernel_of(lambda q, k, v: q, "lambda'\"-1", "test['\"\\n]")
    for one in (KernelSource("'sdpa+compile'"), kernel, kernel_of(on_module_level, "f", "t")):
        compile(script("\n".join(lines), one, ["/a'b", 'C:\\"d']), "repro.py", "exec")


def test_only_what_a_module_has_under_its_name_is_imported():
    def local(q, k, v):
        return q

    assert kernel_of(on_module_level, "f", "t").lines[0] == f"from {__name__} import on_module_level"
    assert import_root(on_module_level) == str(Path(__file__).parents[__name__.count(".")])
    assert (
        kernel_of(local, "local", "t").missing
        == f"the callable of (q, k, v) that t checked (local, {__file__}:{local.__code__.co_firstlineno})"
    )
    local.__qualname__ = "on_module_level"
    assert kernel_of(local, "local", "t").missing  # another one has the name
    assert kernel_of(torch.nn.Identity(), "Identity", "t").missing
    assert import_root(torch.nn.functional.softmax) is None

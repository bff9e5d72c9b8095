"""A guest is one file and one line: what stands outside of the package is judged, recorded and shown as what stands within."""

from pathlib import Path

import pytest

from pytest_attn.backends.registry import Registry
from pytest_attn.reports.records import read_records
from pytest_attn.seam import guests
from pytest_attn.session.kinds import ATTENTION, KINDS, register_kinds_of_guests

EXAMPLE = (Path(__file__).parents[2] / "docs" / "examples" / "rms_norm.py").read_text()
TESTS = """
import pytest, torch

def right(x, weight):
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), 1e-6).to(x.dtype)

def wrong(x, weight):
    return right(x, weight) * 1.1

@pytest.mark.rms_norm
def test_right(rms_norm): rms_norm.check(right)
@pytest.mark.rms_norm
def test_wrong(rms_norm): rms_norm.check(wrong)
@pytest.mark.rms_norm
def test_nothing(rms_norm): pass
"""


@pytest.fixture
def guest(pytester, monkeypatch):
    """Return a function that runs pytest where a distribution with the example is on sys.path."""
    (pytester.path / "rms_norm.py").write_text(EXAMPLE)
    info = pytester.path / "rms_norm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rms-norm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pytest_attn]\nrms_norm = rms_norm:GUEST\n")
    pytester.makepyfile(test_norms=TESTS)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(pytester.path)
        _forget_guests()
        yield lambda *options: pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)
    _forget_guests()
    register_kinds_of_guests()


def _forget_guests():
    guests.cache_clear()
    KINDS.clear()
    KINDS[ATTENTION.marker] = ATTENTION


def test_another_operator_is_judged_in_the_terminal_in_records_and_on_the_page(guest, pytester):
    assert len(EXAMPLE.splitlines()) <= 80
    result = guest("--attn-output=run.jsonl", "--attn-output=run.md", "--strict-markers")
    result.assert_outcomes(passed=3, failed=6)
    result.stdout.fnmatch_lines_random(
        [
            "E*mismatch: out of wrong on 7x129: z *, limit 8",
            "E*  reproduce  pytest 'test_norms.py::test_wrong*7x129*",
            "mismatch * wrong on 7x129: out of wrong*",
            "*judges nothing: it passed without a call of rms_norm.check*",
        ]
    )
    found = {
        (one["test"].partition("::")[2], one["question"], one["verdict"]) for one in read_records(pytester.path / "run.jsonl")
    }
    assert ("test_right[3x4096]", "rms norm", "passed") in found
    assert ("test_wrong[1x64]", "rms norm", "mismatch") in found
    assert "out of wrong on 7x129" in (pytester.path / "run.md").read_text()
    guest("--markers").stdout.fnmatch_lines(["@pytest.mark.rms_norm(device=None): *exact RMSNorm"])
    guest("--fixtures").stdout.fnmatch_lines(["rms_norm*"])


def test_an_entry_point_that_names_something_else_is_told(guest, pytester):
    (pytester.path / "rms_norm-1.0.dist-info" / "entry_points.txt").write_text("[pytest_attn]\nrms_norm = rms_norm:KIND\n")
    with pytest.raises(TypeError, match="the entry point rms_norm:KIND of pytest_attn must name a Guest, got Kind"):
        guests()


THEIRS = """
from pytest_attn import Backend
from pytest_attn.seam import Guest

class Theirs(Backend):
    name, prepare = "theirs", None

class Chosen(Theirs):
    stands_for = "one of several"

    def __init__(self, name):
        self.name = f"chosen:{name}"

GUEST = Guest(backends={"": {"theirs": "rms_norm:Theirs", "chosen:NAME": "rms_norm:Chosen"}}, aliases={"their_own": "theirs"})
"""


def test_a_guest_adds_backends_a_family_of_them_and_an_alias(guest, pytester):
    (pytester.path / "rms_norm.py").write_text(THEIRS)
    registry = Registry()
    assert registry["their_own"] is registry["theirs"]
    assert registry["chosen:one"].name == "chosen:one"
    assert ("chosen:NAME", "one of several") in registry.families
    assert [one for one in registry.names if one in ("math", "theirs", "int8_dynamic")] == ["math", "theirs", "int8_dynamic"]
    assert not registry.is_own("theirs")


def test_two_guests_cannot_name_one_backend(guest, pytester):
    (pytester.path / "rms_norm.py").write_text(THEIRS.replace('"theirs"', '"sdpa"'))
    with pytest.raises(ValueError, match="two backends are named 'sdpa'; rename one"):
        Registry()


#: what else a guest may bring, behind the example
MORE = """
from typing import Annotated, TypedDict

from pytest_attn.session.option_types import switch

def contradiction(settings):
    return "--attn-halved: leave out --attn-thorough" if settings.more["halved"] and settings.thorough else ""

class Fields(TypedDict):
    halves: Annotated[int, "of the rows"]

def lines(records, width):
    yield f"{sum(r['halves'] for r in records)} halves of {len(records)}", {}

def results(records):
    yield "Halves", [f"{len(records)} records"]

HERE = "rms_norm:"
GUEST = Guest(
    kinds=(KIND,),
    options={"halved": switch("Judge half of the rows", group="judge", short="half of the rows")},
    contradiction=f"{HERE}contradiction",
    fields=f"{HERE}Fields",
    lines=f"{HERE}lines",
    results=f"{HERE}results",
    attributes={"halves": f"{HERE}lines"},
)
"""


@pytest.mark.slow("in a process of its own, as the fields of a record are read once")
def test_a_guest_adds_options_fields_and_texts(guest, pytester, monkeypatch):
    path = pytester.path / "rms_norm.py"
    path.write_text(EXAMPLE.replace('"z_element": z}', '"z_element": z, "halves": 1}') + MORE)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")
    judged = pytester.runpytest_subprocess("-v", "--attn-halved", "--attn-output=run.md", "--attn-output=run.jsonl")
    judged.stdout.fnmatch_lines(["attn: --attn-halved", "* halves of *"])
    assert "### Halves" in (pytester.path / "run.md").read_text()
    records = read_records(pytester.path / "run.jsonl")
    assert [one["halves"] for one in records if one["question"] == "rms norm"] == [1] * 6
    help_ = pytester.runpytest_subprocess("--help").stdout
    help_.fnmatch_lines(["attention kernels: what to judge:", "*--attn-halved * half of the rows"])
    refused = pytester.runpytest_subprocess("--attn-halved", "--attn-thorough").stderr
    refused.fnmatch_lines(["*--attn-halved: leave out --attn-thorough"])

"""RMSNorm judged as attention is: a guest of pytest-attn, in one file and one line, `rms_norm = "rms_norm:GUEST"`."""

import torch

from pytest_attn import Workload
from pytest_attn.cases.conclude import conclude
from pytest_attn.cases.context import CaseContext
from pytest_attn.cases.evaluator import Evaluator
from pytest_attn.cases.judgment import Judgment
from pytest_attn.reports.verdict import Verdict
from pytest_attn.seam import Guest, Kind
from pytest_attn.session.collection import Items
from pytest_attn.session.kinds import CaseParameter
from pytest_attn.session.marks import AttentionMark

SHAPES = (1, 64), (7, 129), (3, 4096)
LIMIT = 8.0


class NormItems(Items):
    """The items of a test: one per shape."""

    def read(self, marker, session):
        return AttentionMark.from_keywords(marker, ("device",), session.registrations.registry)

    def cases(self, mark, names, session):
        return [CaseParameter(Workload(rows, head_dim=size, name=f"{rows}x{size}"), None) for rows, size in SHAPES]


class NormCase:
    """What a test touches."""

    def __init__(self, context):
        self._context = context

    @property
    def is_judged(self):
        return self._context.is_judged

    def check(self, fn):
        """Hold fn(x, weight) against RMSNorm in float64; raises AssertionError where it is wrong."""
        __tracebackhide__ = True
        return conclude(self._context, NormEvaluator(fn, self._context.workload))


class NormEvaluator(Evaluator):
    """Compares one output with exact RMSNorm."""

    question = "rms norm"

    def __init__(self, fn, workload):
        self.fn, self.subject, self.workload, self.on = fn, fn.__name__, workload, workload.id
        self.doing = f"checking {fn.__name__}"

    def judge(self, context):
        torch.manual_seed(context.session.settings.seed)
        x = torch.randn(self.workload.q_len, self.workload.head_dim, dtype=torch.bfloat16)
        weight = torch.rand(self.workload.head_dim, dtype=torch.bfloat16) + 0.5
        exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        z = ((self.fn(x, weight).double() - exact).abs() / (exact.abs() * 2**-8 + 1e-8)).max().item()  # one rounding
        if z <= LIMIT:
            return Judgment(Verdict.PASSED, z, fields={"tensor": "out", "z_element": z})
        said = f"out of {self.subject} on {self.workload.id}: z {z:.4g} in one element, limit {LIMIT:g}"
        return Judgment(Verdict.MISMATCH, reason=said, text=f"mismatch: {said}", fields={"z_element": z})


def make_case(request, parameter):
    return NormCase(CaseContext.of_item(request, parameter))


KIND = Kind(
    marker="rms_norm",
    maker="rms_norm:make_case",
    must_call="rms_norm.check",
    fixture="rms_norm",
    takes=("rms_norm",),
    items="rms_norm:NormItems",
    help="rms_norm(device=None): the test holds a function of (x, weight) against exact RMSNorm",
)
GUEST = Guest(kinds=(KIND,))

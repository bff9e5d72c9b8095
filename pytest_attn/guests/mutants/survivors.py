"""What would have found a faulty kernel that the tests let pass: changes of what they ask, tried until one does."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from pytest_attn.backends.contexts import quiet
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.guests.mutants.kernel import KernelBackend, honest_backend
from pytest_attn.guests.mutants.mutant import Mutant
from pytest_attn.invariants.all_invariants import judge_invariants
from pytest_attn.reports.lines import count
from pytest_attn.workloads.catalog import Catalog
from pytest_attn.workloads.masks import Window
from pytest_attn.workloads.workload import Workload

#: of distributions whose scores are larger than those of the default ones
_INPUTS = ("outlier", "large", "peaky")
#: groups of small workloads, and how many of those that reach a fault are tried, the smallest first
_GROUPS, _MOST_BUNDLED = ("smoke", "edges", "features"), 12
#: operations below which nobody waits for a check
_FEW = 1e8


@dataclass(frozen=True)
class Change:
    """One change of what a test asks.

    words: what a user types. spec: the changed one. asks: "check", "invariants", or "thorough", those and more of them.
    """

    words: str
    spec: CheckSpec
    asks: str = "check"

    @property
    def cost(self) -> int:
        """Order in which changes are tried: powers of ten of its operations, those that nobody waits for alike."""
        w, passes = self.spec.workload, 1 + 3 * self.spec.backward
        return int(math.log10(max(w.flops() * passes * len(self.spec.inputs), _FEW)))


def changes(mutant: Mutant, spec: CheckSpec, catalog: Catalog) -> Iterator[Change]:
    """Yield what is tried, cheapest first; but invariants first, where only other calls or other memory show a fault."""
    yield Change("", spec)
    plain = sorted(_plain(mutant, spec, catalog), key=lambda change: change.cost)
    asked = [
        Change("attn.check_invariants", spec, "invariants"),
        Change("attn.check_invariants with --attn-thorough", spec, "thorough"),
    ]
    yield from [*plain, *asked] if mutant.condition in ("call", "magnitude") else [*asked, *plain]
    for change in plain:
        if change.spec.workload.name not in (None, spec.workload.name):
            yield replace(change, words=f"attn.check_invariants on {change.words}", asks="invariants")


def _plain(mutant: Mutant, spec: CheckSpec, catalog: Catalog) -> Iterator[Change]:
    """Yield other arguments of the marker, other fields of the workload, other workloads: those that reach the fault."""
    w = spec.workload

    def on(changed: Workload, words: str, **more: object) -> Iterator[Change]:
        if mutant.is_reached_by(changed, bool(more.get("backward", spec.backward))):
            with contextlib.suppress(ValueError):  # layouts that do not fit the workload
                yield Change(words, replace(spec, workload=changed, **more))  # type: ignore[arg-type]

    def with_fields(fields: Mapping[str, object]) -> Iterator[Change]:
        with contextlib.suppress(ValueError):  # a field that does not fit the others
            changed = w.replace(**fields)
            before = ", ".join(_typed(value) for name in fields if (value := getattr(w, name)) is not None)
            said = ", ".join(f"{name}={_typed(value)}" for name, value in fields.items())
            if changed != w.replace(name=None):
                yield from on(changed, f"{said}{before and f' instead of {before}'} in {w.id}")

    yield from chain.from_iterable(map(with_fields, _options(w)))
    for name in _INPUTS:
        yield from on(w, f'inputs="{name}" in the marker', inputs=(name,))
    yield from chain.from_iterable(map(with_fields, _fields(w)))
    if not spec.backward:
        yield from on(w, "backward=True in the marker", backward=True)
    bundled = [one for group in _GROUPS for one in catalog.select(group) if one != w]
    for backward, also in ((False, ""), (True, " and backward=True")):
        reached = sorted((one for one in bundled if mutant.is_reached_by(one, backward)), key=Workload.flops)
        for one in reached[:_MOST_BUNDLED]:
            yield from on(one, f'the workload "{one.name}"{also}', backward=backward)


def _options(w: Workload) -> Iterator[Mapping[str, object]]:
    """Yield options that do more than those of the workload."""
    if w.softcap is not None:
        yield from ({"softcap": cap} for cap in (w.softcap / 10, 1.0))
    if isinstance(w.mask, Window):
        yield from ({"mask": Window(side, w.mask.right)} for side in (w.kv_len // 4, w.kv_len // 16))


def _fields(w: Workload) -> Iterator[Mapping[str, object]]:
    """Yield other values of fields, the plainest change first."""
    yield {"scale": 0.5}
    yield {"batch": 3}
    yield from ({"heads": group * w.kv_heads} for group in (2, 3) if group != w.group)
    yield from ({"heads": 6, "kv_heads": keys} for keys in (3, 2))
    yield from ({"dtype": dtype} for dtype in ("float16", "bfloat16", "float32") if dtype != w.dtype)
    yield {"head_dim": 40}
    yield {"v_head_dim": 48}
    yield {"kv_len": w.kv_len + 57}
    yield {"kv_lens": (w.kv_len, max(w.kv_len - 13, 1)), "batch": 2}
    yield {"q_lens": (w.q_len, max(w.q_len // 3, 1)), "batch": 2}
    longest = "q_len" if w.q_len == w.kv_len else "kv_len"  # the other follows
    yield from ({longest: length} for length in (300, 2048) if length > w.kv_len)


def _typed(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


class Search:
    """Looks for what finds survivors, for so many seconds in all, of which each gets half of what is left; 0 has no end."""

    def __init__(self, seconds: float, catalog: Catalog, memory: int) -> None:
        self._seconds, self._catalog, self._references = seconds, catalog, ReferenceCache(memory)
        self._spent = 0.0

    def found_with(self, mutant: Mutant, spec: CheckSpec) -> str:
        """Say what finds a mutant that a test of this spec let pass; what the fault-free kernel fails counts for nothing."""
        spec, tried, spent = replace(spec, parameters={}), 0, 0.0
        share = (self._seconds - self._spent) / 2  # one that nothing finds leaves time for the others
        for change in changes(mutant, spec, self._catalog):
            begun = time.monotonic()
            if self._seconds and spent >= share:
                spending = f"Not found with {count(tried, 'change')} in {spent:.1f} s, its part"
                said = spending if tried else "Not looked for, for want"
                return f"{said} of --attn-diagnosis-timeout={self._seconds:g}"
            said = self._finder(mutant.backend, change)
            is_found = bool(said) and not self._finder(honest_backend, change)
            took = time.monotonic() - begun
            spent, self._spent = spent + took, self._spent + took
            tried += 1
            if is_found and not change.words:
                return f"attn.check finds it on {spec.workload.id}: the test lets it pass"
            if is_found and change.asks != "check":
                return f"Found by {change.words} ({said})"
            if is_found:
                return f"Found with {change.words}"
        return f"None of {tried} changes finds it"

    def _finder(self, kernel: Callable[[], KernelBackend], change: Change) -> str:
        """Return what is wrong with a new kernel under a change; "" for nothing."""
        subject, spec = kernel(), change.spec
        try:
            with quiet():
                if change.asks == "check":
                    return "" if judge(subject, spec, self._references).passed else "check"
                report = judge_invariants(subject, spec, self._references, thorough=change.asks == "thorough")
        except Exception as error:
            return type(error).__name__
        return report.broken[0].invariant if report.broken else ""

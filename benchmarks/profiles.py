"""How far fault-free kernels that round elsewhere are from exact attention, each under the precision profile that it declares.

    python benchmarks/profiles.py [NAME ...] [--groups smoke,edges,features]

Emulated kernels of tests/honest/variants.py, forward and backward, on the groups smoke, edges and features and on every
distribution of inputs. Prints the largest z over an element, a row and a head, and the cases that fail. CPU, one thread.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from pytest_attn.backends.registry import Registry
from pytest_attn.correctness.comparison import Comparison
from pytest_attn.correctness.judge import judge
from pytest_attn.correctness.spec import CheckSpec, ReferenceCache
from pytest_attn.workloads.catalog import builtin_catalog
from pytest_attn.workloads.distributions import DISTRIBUTIONS
from pytest_attn.workloads.workload import Workload

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from honest.variants import VARIANTS, Honest

CPU = torch.device("cpu")
CACHE = ReferenceCache()
#: q . k is formed term by term, which takes memory
MOST_PAIRS = 20_000


def comparisons(variant: Honest, workloads: list[Workload]) -> Iterator[Comparison]:
    """Yield the comparison of a kernel on every workload that it takes."""
    for workload in workloads:
        pairs = (workload.q_len or 0) * (workload.kv_len or 0)
        if variant.precision != "decode" or pairs <= MOST_PAIRS:
            spec = CheckSpec(workload, CPU, not workload.has_no_gradient_because, tuple(DISTRIBUTIONS))
            yield judge(spec.subject(Registry(), variant.backend()), spec, CACHE)


def main() -> None:
    """Print a line for each kernel, and one for each case that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--groups", default="smoke,edges,features")
    options = parser.parse_args()
    torch.set_num_threads(1)
    named = [one for group in options.groups.split(",") for one in builtin_catalog().select(group)]
    workloads = [one for one in named if not (one.dropout or one.is_quantized)]  # which these kernels do not take
    for variant in (v for v in VARIANTS if v.name in (options.names or [v.name])):
        found = list(comparisons(variant, workloads))
        rows = [row for one in found for row in one.tensors if row.name != "lse" and not row.wrong_positions]
        largest = (max(getattr(row, level) for row in rows) for level in ("z_element", "z_row", "z_head"))
        levels = " / ".join(f"{z:.2f}" for z in largest)
        failed = [one for one in found if not one.passed]
        print(f"{variant.name:24} {variant.precision:14} {len(found):3} cases  {levels}  {len(failed)} failed", flush=True)
        for one in failed:
            wrong = {row.distribution + " (not finite)" * bool(row.wrong_positions) for row in one.tensors if not row.passed}
            print(f"    {one.workload}: {', '.join(sorted(wrong))}")


if __name__ == "__main__":
    main()

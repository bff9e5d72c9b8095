"""What tests ask an open page for, and the machine, workloads and backend that are on many."""

import json

from fakes.records import BACKENDS, GPU, workloads

CPU = {**GPU, "name": "AMD EPYC", "device": "cpu", "kind": "cpu", "architecture": "cpu", "torch": "2.13.0+cpu"}
FLUX = list(workloads(6))
SDPA = BACKENDS[0]


def settled(page):
    page.wait_for("document.documentElement.dataset.drawn === 'all'")


def texts(page, selector):
    return page(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)")


def set_filter(page, field, value, event="change"):
    page(f"(() => {{ const f = document.getElementById('{field}'); f.value = {json.dumps(value)}; delete document"
         f".documentElement.dataset.drawn; f.dispatchEvent(new Event('{event}', {{ bubbles: true }})); }})()")  # fmt: skip
    settled(page)

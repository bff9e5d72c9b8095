"""The page of --attn-output=FILE.html: one file that opens offline, loads nothing, and runs no script but its own."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from string import Template

from pytest_attn.reports.html.machines import by_machine, facts_in_words, is_wrong, sentence
from pytest_attn.reports.html.payload import payload, to_script
from pytest_attn.reports.records import Record

INSTALL = 'pip install "pytest-attn[report]"'
_SCRIPTS = (
    *("dom", "data", "table", "plot", "problems", "details", "matrix", "layers", "latency", "errors", "roofline", "cases"),
    "main",
)


def missing_libraries() -> list[str]:
    """Return which modules of the extra `report` are not installed; imports none of them."""
    return [name for name in ("altair", "vl_convert") if find_spec(name) is None]


def report_page(records: Sequence[Record], title: str = "pytest-attn report") -> str:
    """Return the whole page. records: those of a run, or what `read_records` returns, of any number of machines.

    Raises ImportError where the extra `report` is not installed.
    """
    from pytest_attn.reports.html.charts import charts

    script = '"use strict";\n(() => {\n' + "\n".join(_asset(f"{name}.js") for name in _SCRIPTS) + "\n})();"
    library = _library()
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        policy=_policy(script, library),
        style=_asset("style.css"),
        header=_header(records),
        data=to_script(payload(records)),
        charts=to_script(charts()),
        script=script,
        library=library,
    )


def _asset(name: str) -> str:
    return files("pytest_attn.reports.html").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script, of the version that Altair writes for, or else the newest."""
    import altair
    import vl_convert

    version = altair.SCHEMA_VERSION.removeprefix("v").rpartition(".")[0]
    known = version in vl_convert.get_vegalite_versions()
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version if known else None)
    inert = bundle.replace("</script", r"<\/script").replace("<!--", r"<\!--")
    return f"(() => {{ {inert}\n }})();"


def _policy(*scripts: str) -> str:
    """Return a content security policy under which nothing is loaded, and no script runs but these.

    Vega writes style attributes, which have no hash.
    """
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    sources = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    return f"{sources}; base-uri 'none'; form-action 'none'"


def _header(records: Sequence[Record]) -> str:
    """Write how the run went and where, so that it is read before, and without, any script."""
    machines = by_machine(records)
    if not machines:
        return f'<p id="sentence" class="sentence">{escape(sentence(records))}</p><dl id="facts" class="facts"></dl>'
    first = machines[0]
    tone = "bad" if is_wrong(first.records) else "fine"
    facts = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(text)}</dd></div>" for term, text in facts_in_words(first))
    return (
        f'<p id="sentence" class="sentence {tone}">{escape(sentence(first.records))}</p>'
        f'<dl id="facts" class="facts">{facts}</dl>'
    )

"""The charts, written with Vega-Altair: what is drawn from the rows that the page's script names "rows".

Colors of text and axes are the style sheet's, so that one drawing serves light, dark and paper. A row brings the color,
dash and shape of its series with it: a backend looks the same in every chart.
"""

from typing import Any, Literal, TypeAlias

import altair as alt

_TIME = (
    "datum.value >= 1 ? format(datum.value, '.4~g') + ' s' : datum.value >= 1e-3 ?"
    " format(datum.value * 1e3, '.4~g') + ' ms' : format(datum.value * 1e6, '.4~g') + ' us'"
)
_BAD, _PLAIN = "#d2463c", "#7d848f"
Scale = Literal["linear", "log"]
Drawing: TypeAlias = alt.LayerChart | alt.FacetChart  # what alt.layer returns


def charts() -> dict[str, dict[str, Any]]:
    """Return a Vega-Lite specification for each name that the script asks for."""
    drawn = {
        "latency-linear": latency("linear"),
        "latency-log": latency("log"),
        "errors": errors(),
        "roofline": roofline(),
        "history": history(),
    }
    return {name: _specification(chart) for name, chart in drawn.items()}


def _specification(chart: Drawing) -> dict[str, Any]:
    fitted = alt.AutoSizeParams(type="fit-x", contains="padding")
    found: dict[str, Any] = chart.properties(width="container", autosize=fitted, background="transparent").to_dict()
    found.pop("$schema")  # an address, though nothing asks for it
    axis = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "gridOpacity": 0.6}
    found["padding"] = {"left": 2, "right": 16, "top": 6, "bottom": 4}
    found["config"] = {"view": {"stroke": None}, "font": "system-ui, sans-serif", "axis": axis}
    return found


def _chart() -> alt.Chart:
    return alt.Chart(alt.NamedData("rows"))


def _time_axis(title: str) -> alt.Axis:
    return alt.Axis(title=title, labelExpr=_TIME, labelOverlap="greedy", tickCount=6)


def _series() -> tuple[alt.Color, alt.Shape]:
    return alt.Color("color:N").scale(None), alt.Shape("shape:N").scale(None)


def _tooltip(**titles: str) -> list[alt.Tooltip]:
    return [alt.Tooltip(f"{field}:N", title=title) for field, title in titles.items()]


def latency(scale: Scale) -> Drawing:
    """p50 against sequence length, a line per backend, with the interval of each p50."""
    color, shape = _series()
    from_zero = alt.Undefined if scale == "log" else True  # a logarithm has no zero to begin at
    length = alt.X("length:Q", title="sequence length (keys)")
    length = length.scale(type=scale, zero=alt.Undefined if scale == "log" else False, nice=False, padding=14)
    length = length.axis(format="d", labelOverlap="greedy")  # its ticks are the lengths, which the script puts in
    p50 = alt.Y("p50:Q", axis=_time_axis("p50")).scale(
        type=scale, zero=from_zero, nice=scale == "linear", padding=alt.Undefined if scale == "linear" else 16
    )
    tooltip = _tooltip(backend="backend", workload="workload", length="length", time="p50", interval="interval")
    dash = alt.StrokeDash("dash:N").scale(None)
    base = _chart().encode(x=length)
    lines = base.mark_line(strokeWidth=2).encode(y=p50, color=color, strokeDash=dash, detail="backend:N")
    bars = base.mark_rule(strokeWidth=2, opacity=0.7).encode(y=alt.Y("low:Q").title("p50"), y2="high:Q", color=color)
    ends = {"size": 9, "thickness": 2, "opacity": 0.7}
    caps = [base.mark_tick(**ends).encode(y=alt.Y(f"{end}:Q").title("p50"), color=color) for end in ("low", "high")]
    points = base.mark_point(size=60, filled=True, opacity=1).encode(y=p50, color=color, shape=shape, tooltip=tooltip)
    return alt.layer(lines, bars, *caps, points, height=380)


def errors() -> Drawing:
    """Residuals in budgets: per backend the middle half, 5 to 95 %, the median and the largest, beside the limit."""
    tooltip = _tooltip(backend="backend", number="tensors", middle="median", most="largest", where="largest in")
    order = alt.Y("backend:N", sort=None, title=None, axis=alt.Axis(labelLimit=150, grid=False, ticks=False))
    scale = alt.Scale(type="log", nice=False, padding=8)
    short = "datum.label && datum.value >= 1e4 ? format(datum.value, '.0e') : datum.label"
    axis = alt.Axis(format="~g", labelExpr=short, grid=False, labelOverlap="greedy")
    base = _chart().encode(y=order)
    whisker = base.mark_rule(strokeWidth=1.5, color=_PLAIN).encode(
        x=alt.X("p5:Q", scale=scale, axis=axis, title="z"), x2="p95:Q"
    )
    box = base.mark_bar(height=10, opacity=0.55, color="#3b7dd8").encode(
        x=alt.X("p25:Q").title("z"), x2="p75:Q", tooltip=tooltip
    )
    middle = base.mark_tick(thickness=2.5, size=14, color=_PLAIN).encode(x=alt.X("p50:Q").title("z"))
    is_over = alt.datum.largest > alt.datum.limit
    worst = base.mark_point(size=70, filled=True, opacity=1).encode(
        x=alt.X("largest:Q").title("z"),
        color=alt.condition(is_over, alt.value(_BAD), alt.value(_PLAIN)),
        shape=alt.condition(is_over, alt.value("cross"), alt.value("circle")),
        tooltip=tooltip,
    )
    limit = _chart().mark_rule(color=_BAD, strokeDash=[5, 3], strokeWidth=1.5).encode(x=alt.X("min(limit):Q").title("z"))
    return alt.layer(whisker, box, middle, worst, limit)  # as high as there are backends, which the script knows


def roofline() -> Drawing:
    """FLOP/s that each case reached against its arithmetic intensity, under the measured ceilings where these are known."""
    color, shape = _series()
    x = alt.X("intensity:Q", title="arithmetic intensity, FLOP per byte").scale(type="log", nice=False, padding=20)
    x = x.axis(format="~s", grid=True, labelOverlap="greedy")
    y = alt.Y("achieved:Q", title="FLOP/s").scale(type="log", nice=False, padding=20).axis(format="~s", labelOverlap="greedy")
    tooltip = _tooltip(backend="backend", workload="case", rate="reached", share="of the ceiling", time="p50")
    roof = _chart().transform_filter("datum.kind == 'roof'").encode(x=x, y=y, detail="dtype:N")
    lines = roof.mark_line(color=_PLAIN, strokeWidth=2)
    names = roof.mark_text(align="left", dy=-9, fontSize=12, color=_PLAIN).encode(text="label:N")
    points = _chart().transform_filter("datum.kind == 'case'").mark_point(size=55, filled=True, opacity=0.85)
    return alt.layer(lines, names, points.encode(x=x, y=y, color=color, shape=shape, tooltip=tooltip), height=380)


def history() -> Drawing:
    """One case's p50 now, over its recordings; the band is what the processes of the last recording spread over."""
    when = alt.X("when:O", sort=None, title=None, axis=alt.Axis(labelAngle=0, labelLimit=120, grid=False))
    p50 = alt.Y("p50:Q", axis=_time_axis("p50")).scale(zero=False, padding=16)
    tooltip = _tooltip(what="what", when="when", time="p50", reason="because")
    band = _chart().transform_filter("datum.kind == 'band'").mark_rect(opacity=0.16, color="#3b7dd8")
    past = _chart().transform_filter("datum.kind == 'recorded'").encode(x=when, y=p50, tooltip=tooltip)
    runs = _chart().transform_filter("datum.kind == 'run'").encode(x=when, y=p50, tooltip=tooltip)
    now = _chart().transform_filter("datum.kind == 'now'").encode(x=when, tooltip=tooltip)
    return alt.layer(
        band.encode(y=alt.Y("low:Q").title("p50"), y2="high:Q"),
        past.mark_line(strokeWidth=2, color="#3b7dd8"),
        past.mark_point(filled=True, size=55, color="#3b7dd8", opacity=1),
        runs.mark_tick(size=16, thickness=1.5, color=_PLAIN),
        now.mark_rule(strokeWidth=2, color="#d1601f").encode(y=alt.Y("low:Q").title("p50"), y2="high:Q"),
        now.mark_point(filled=True, size=80, shape="diamond", color="#d1601f", opacity=1).encode(y=p50),
        height=280,
    )

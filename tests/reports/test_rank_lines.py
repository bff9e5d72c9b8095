"""A rank on the terminal: a line per workload, all that is behind it, why there is none."""

from fakes.ranked import checked, right, text, timed

from pytest_attn.reports.rank_lines import WIDTH


def test_one_line_says_it_all():
    records = (
        right("a", 1.0e-3) + right("b", 1.002e-3) + right("c", 1.5e-3, error=1e-4) + [checked("d", "mismatch", reason="z 9")]
    )
    header, row, excluded, *closing = text(records)
    assert header.split() == ["workload", "fastest", "p50", "+-", "ahead", "ties", "front"]
    assert row.split() == ["flux-L512", "fwd", "a", "1.0000", "ms", "0.1%", "x1.50", "b", "c"]
    assert excluded == "wrong         d: z 9"
    assert closing[0] == "rank: 1 workload and direction ranked; fastest: a 1"
    assert closing[1] == "rank: ties do not differ from the fastest (95 %); -v shows every time and error"


def test_lines_fit_eighty_columns():
    many = [
        r
        for n in range(30)
        for r in right(f"a_backend_with_a_long_name_{n}", 1e-3, workload="b2-h32-kv8-q4096-k8192-d128-causal")
    ]
    many += [
        checked(f"refused_{n}", "skipped", reason="because " * 20, workload="b2-h32-kv8-q4096-k8192-d128-causal") for n in "ab"
    ]
    lines = text(many)
    assert max(map(len, lines)) <= WIDTH
    assert any("+29" in line for line in lines)
    assert any("refused_a, refused_b" in line for line in lines)


def test_verbose_shows_every_candidate():
    records = right("a", 1e-3) + right("b", 2e-3, error=1e-4) + [checked("c", "skipped", reason="needs sm90")]
    shown = text(records, verbose=True)
    assert shown[0] == "flux-L512 forward (cold)"
    assert shown[2].split() == ["fastest", "a", "1.0000", "ms", "0.1%", "-", "1.0e-03", "1.0", "MiB", "front"]
    assert shown[3].split() == ["slower", "b", "2.0000", "ms", "0.1%", "x2.00", "1.0e-04", "1.0", "MiB", "front"]
    assert shown[4] == "  skipped: c: needs sm90"


def test_nothing_timed_says_what_to_type():
    assert text([checked("a")]) == [
        "rank: nothing was timed; call attn.measure(attn_backend) in a test, or type"
        " pytest --pyargs pytest_attn.suite.test_latency --attn-rank"
    ]
    assert text([checked("a"), timed("a", 0, "untimed", reason="2 workers share cpu")])[0] == (
        "rank: nothing was timed: 2 workers share cpu"
    )


def test_nothing_to_rank_says_why():
    lines = text(right("a", 1e-3, latency={"disturbances": ["hot"]}))
    assert lines == ["rank: nothing can be ranked: 1 inconclusive", "inconclusive  a: disturbed: hot"]

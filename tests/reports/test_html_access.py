"""Who reads the page of --attn-output: by keyboard, with a screen reader, in the dark, on a narrow screen, on paper."""

import itertools

import pytest
from fakes.pages import texts


@pytest.mark.slow("opens another page")
def test_the_theme_follows_the_system_and_the_button(show, small):
    page = show(small, dark=True)
    back = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.chart svg text')).fill"
    assert (page(back), page(ink)) == ("rgb(20, 23, 28)", "rgb(231, 234, 239)")
    page("document.getElementById('theme').click()")
    assert (page(back), page(ink)) == ("rgb(255, 255, 255)", "rgb(27, 31, 38)")
    assert page("document.getElementById('theme').textContent") == "Theme: light"
    page.close()


CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const back = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = rgb(getComputedStyle(one).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const ratio = (element) => {
    const [a, b] = [light(rgb(getComputedStyle(element).color)), light(back(element))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const tags = "p, td, th, dd, dt, a, button, small, b, span, summary, label, code, h1, h2, h3, li, legend, caption";
  return [...document.querySelectorAll(tags)].filter((one) => one.offsetParent)
    .map((one) => [one.className || one.tagName, ratio(one)]).filter(([, found]) => found < 4.5);
})()"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dark", [False, True])
def test_all_text_has_enough_contrast(show, small, dark):
    page = show(small, dark=dark)
    assert page(CONTRAST) == []
    page.close()


def test_a_screen_reader_finds_names_headers_and_landmarks(page):
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "link", "checkbox", "radio", "combobox", "searchbox", "region", "grid", "table"}
    named = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if not n.get("ignored")]
    assert [(role, name) for role, name in named if role in roles and not name.strip()] == []
    assert {"main", "navigation", "search", "banner", "complementary", "contentinfo"} <= {role for role, _ in named}
    assert page("[...document.querySelectorAll('th')].filter((t) => !t.scope).length") == 0
    assert page("document.documentElement.lang") == "en"
    levels = page("[...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))")
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), "no level is left out"


def test_everything_is_reached_by_keyboard_and_seen_there(show, small):
    page = show(small)
    page.press("Tab")
    assert page("document.activeElement.className") == "skip"
    outlines = []
    for _ in range(12):
        page.press("Tab")
        outlines.append(page("getComputedStyle(document.activeElement).outlineStyle"))
    assert set(outlines) == {"solid"}
    page.close()


def test_a_command_is_copied_or_at_least_selected(page):
    button = "document.querySelector('#wrong .command button')"
    wanted = texts(page, "#wrong .command code")[0]
    page("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    page(f"{button}.click()")
    page.wait_for(f"{button}.textContent !== 'Copy'")
    assert page("getSelection().toString()") == wanted
    assert page("document.getElementById('said').textContent").startswith("Command ")


def test_a_narrow_page_does_not_scroll_sideways(show, small):
    page = show(small, width=400, height=800)
    assert page("document.documentElement.scrollWidth") <= 400
    page.close()

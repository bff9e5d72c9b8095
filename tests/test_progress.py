"""What a terminal shows while fresh processes confirm: behind pytest's line, and gone afterwards."""

import io
from types import SimpleNamespace

from pytest_attn.session.progress import confirmation_progress


def config_with(is_terminal, width=80, used=20):
    file = io.StringIO()
    writer = SimpleNamespace(fullwidth=width, width_of_current_line=used, _file=file)
    plugins = {"terminalreporter": SimpleNamespace(isatty=is_terminal, _tw=writer)}
    return SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=plugins.get)), file


def test_it_names_the_process_and_leaves_nothing_behind():
    config, file = config_with(is_terminal=True)
    show = confirmation_progress(config, "mine on tiny", 3)
    show(0)
    assert file.getvalue() == "\x1b7 timing mine on tiny again, fresh process 1 of 3\x1b[K\x1b8"
    file.truncate(0)
    file.seek(0)
    show(3)
    assert file.getvalue() == "\x1b7\x1b[K\x1b8"


def test_it_stays_on_the_line():
    config, file = config_with(is_terminal=True, width=40, used=20)
    confirmation_progress(config, "mine on tiny", 3)(0)
    assert len(file.getvalue()) - len("\x1b7\x1b[K\x1b8") == 19


def test_it_is_silent_where_nobody_watches():
    config, file = config_with(is_terminal=False)
    confirmation_progress(config, "mine on tiny", 3)(0)
    assert file.getvalue() == ""

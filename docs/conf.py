"""Sphinx: MyST pages in Furo's clothes; the reference is read from the package, see _ext/attn_reference.py."""

import sys
from pathlib import Path

from pytest_attn import __version__

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "pytest-attn"
copyright = "the pytest-attn developers"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "attn_reference"]
exclude_patterns = ["_build", "examples"]
default_role = "code"  # docstrings say `name`

myst_heading_anchors = 3

autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"pytest-attn {__version__}"
html_copy_source = False
html_show_copyright = False
highlight_language = "none"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

"""Sphinx configuration: an offline site whose code cells run when it is built; a warning fails the build."""

import os
from importlib.metadata import version as installed

os.environ["PLOTLY_RENDERER"] = "notebook"  # plotly's script stands in each page: the site needs no network

project = "align_circuits"
author = "The align_circuits developers"
release = version = installed("align-circuits")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "conf.py", "images", "jupyter_execute"]
source_suffix = {".md": "myst-nb", ".py": "myst-nb"}
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 1200  # seconds a cell: the tuning of a demo takes minutes on a busy machine
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_use_ivar = True

html_theme = "furo"
html_title = "align_circuits"

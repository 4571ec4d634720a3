"""Settings of the documentation site: ``python -m sphinx -W --keep-going -b html docs build/docs``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import pfl_lightning

project = "pfl_lightning"
author = "The pfl_lightning developers"
copyright = "2026, The pfl_lightning developers"
version = release = pfl_lightning.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "generated_pages",  # docs/_ext: the API reference and the page of hyper-parameters
    "leakage",  # docs/_ext: what updates tell, on the pages of methods
    "docstrings",  # docs/_ext: cross-references, formulas in plain text
]
exclude_patterns = ["_ext"]

html_theme = "furo"
html_title = f"pfl_lightning {version}"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
# Links to files outside docs/ (CONTRIBUTING.md, examples/) are shown as their names.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

default_role = "code"  # `name` in a docstring is code
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_preserve_defaults = True  # defaults as they stand in the code
maximum_signature_line_length = 90
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # an attribute in a class docstring and in its body is one entry
napoleon_use_rtype = False

# A cross-reference to a name that does not exist is an error. Names of other packages are shown without a link: the
# site is built without a network.
nitpicky = True
nitpick_ignore = [
    ("py:class", "MakeTrainer"),  # a type alias, imported for type checkers alone
    ("py:class", "Clients"),  # of pfl_lightning.state, which has no page
    ("py:class", "UserModule"),  # of pfl_lightning.drop_in, which has no page for it
    ("py:class", "L.LightningModule"),  # functions of federation.own_models, which name the federation for types alone
    ("py:class", "Path"),
]
toc_object_entries_show_parents = "hide"

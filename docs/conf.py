"""Sphinx configuration: `make docs` builds the pages of this folder as a site in build/docs."""

project = "ggufmill"
author = "the ggufmill developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
html_theme = "furo"
html_title = "ggufmill"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
autodoc_typehints = "description"
autodoc_member_order = "bysource"
nitpicky = False
# Tables of benchmarks/ are no pages of the site; tests/docs checks that every linked file exists.
suppress_warnings = ["myst.xref_missing"]

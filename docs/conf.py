"""How Sphinx builds the site: docs/explanation/decisions.md says why Sphinx."""

from hvdenv import __version__

project = "hvdenv"
author = "the hvdenv authors"
release = version = __version__

extensions = ["myst_parser"]
# Other pages include the first two; the others are files to download.
exclude_patterns = [
    "generated/exit-codes.md",
    "explanation/curves.md",
    "tarn/*",
]
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
# Commands and options are pasted: their quotes and dashes stay as they are.
smartquotes = False
nitpicky = True

html_theme = "sphinx_rtd_theme"
html_title = "hvdenv"
html_theme_options = {"navigation_depth": 2}
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_use_index = False
# Pages opened from disk may not read others, so results have titles only.
html_show_search_summary = False
highlight_language = "text"

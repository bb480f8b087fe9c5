"""Web pages: their rendering, and the base template and stylesheet that all pages share.

It knows no page: templates, stylesheets and scripts lie beside the packages that show them, and texts are decided there.
Start with ``render``.
"""

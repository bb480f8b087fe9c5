"""Describe the data port for clients, as OpenAPI 3.1 and as a page.

It owns only the description; nothing here serves a request. Routes and errors are those of ``gateway.api``; the shapes of bodies are YAML
files in this folder, as JSON Schema. The rule: everything described is served, and everything served is described; tests compare requests
and responses, also of a real vLLM, with the shapes.
Start with ``document``.
"""

from gateway.api.reference.document import document
from gateway.api.reference.page import page

__all__ = ["document", "page"]

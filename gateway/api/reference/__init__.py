"""What clients may ask on the data port and what they get, as OpenAPI 3.1 and as a page.

Owns the description alone; nothing here serves a request. The routes and the errors are those of ``gateway.api.routes`` and
``gateway.api.errors``; the shapes of bodies are the YAML files beside this, in the words of JSON Schema. The rule: nothing is described
that is not served, and nothing is served that is not described; tests hold requests and answers, a real vLLM's too, to the shapes.
"""

from gateway.api.reference.document import document
from gateway.api.reference.page import HEADERS, page

__all__ = ["HEADERS", "document", "page"]

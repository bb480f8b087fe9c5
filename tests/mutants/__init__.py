"""Mutation testing of the trusted core: small changes of its modules, each of which a test must notice.

Start with ``core.py``, the list of the modules with their tests. ``mutations.py`` makes the changes, ``trial.py`` tries a change, and
``report.py`` writes docs/mutants.md. The project has its own tool, because mutmut 3 and cosmic-ray have neither tests by module nor
samples. mutmut maps the tests by a run of the whole suite. cosmic-ray starts a command for each mutant, which takes three times as long.
"""

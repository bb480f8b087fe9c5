"""Mutation testing: small changes of the most important modules, each of which a test must notice.

Start with ``areas.py`` and ``core.py``, the lists of the modules with their tests. ``mutations.py`` and ``lua.py`` make the changes,
``trial.py`` tries a change, and ``report.py`` writes docs/mutants.md. The project has its own tool, because mutmut 3 and cosmic-ray have
neither tests by module nor samples. mutmut maps the tests by a run of the whole suite. cosmic-ray starts a command for each mutant, which
takes three times as long.
"""

"""Builds the compiled core: the modules of the data path as extension modules. It is optional, and not installed itself.

Start with ``declarations`` (pure): what Cython has to know, derived from the modules' annotations. ``hook`` compiles them for a wheel.
The rule: the Python modules are the only source, and they work without being compiled.
"""

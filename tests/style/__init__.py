"""Checks of the project's words: names, headings and phrases that have a plainer term. Start with ``vocabulary.py``, the table."""

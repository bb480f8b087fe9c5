"""The portal: pages on the data port for people who use models.

The rule: a page is a shell that contains nothing about a key. Its script fetches everything with the key of the tab or the session of the
person, through the routes that programs use, and inserts it as text.
"""

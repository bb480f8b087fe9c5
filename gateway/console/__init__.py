"""The console: pages on the admin port for people who operate the gateway.

The rule: a page is a shell that contains nothing about the gateway. Its script fetches everything with the token of the tab or the session
of the person, through the routes that commands use, and inserts it as text. An action is a route, so it is in the audit log.
"""

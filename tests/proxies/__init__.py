"""Shared connections: proxies in front of the gateway send the requests of many clients on few connections. No request may get another's
key.

``traffic`` draws requests, valid and hostile, each with a secret that names its key. ``origin`` is a model server that repeats the
secret and records it. ``fronts`` runs the proxies, ``sharing`` adds a proxy that cuts what it forwards, ``run`` sends and checks, and
``report`` (``make proxies``) runs a million requests and writes docs/proxies.md.
"""

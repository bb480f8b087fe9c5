"""Recording: the bodies of selected requests and of their responses, kept for operators who debug and evaluate.

A worker collects what is received and sent (``capture``, ``recorder``), and a thread redacts, encrypts and stores it (``writer``). It
records no header and no secret, and it never delays or fails a request: a record that cannot be kept is dropped and counted.
Start with ``recorder``, then ``writer``.
"""

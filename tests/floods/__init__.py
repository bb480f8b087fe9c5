"""Floods: requests of one client that cost the gateway the most. ``requests`` lists them with bounds on counted steps, which
``tests/gateway/test_floods.py`` checks. ``make floods`` sends each of them beside another client and prints how much slower that client is.
"""

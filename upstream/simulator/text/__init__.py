"""The text of the simulator: its tokenizer, its sentences, its JSON and its log probabilities. Pure.

Everything is a function of a seed, so that the same request gets the same tokens. It does not know HTTP.
Start with ``plan``, which decides a response before its first token is sent.
"""

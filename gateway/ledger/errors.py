"""What can go wrong with the ledger."""

from __future__ import annotations


class AwayError(Exception):
    """The database does not answer or takes nothing at the moment; the text says why."""


class QuestionError(Exception):
    """A question cannot be answered; the text tells the operator why."""


class SpoolTakenError(Exception):
    """Another gateway has the spool's folder."""

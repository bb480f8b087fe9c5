"""The totals of old rows by day, and the frozen reports of closed months.

It owns the tables of both and the decisions about a late row. It must not read the configuration, and it prints nothing: see
``gateway.usage.month_sheet``. Start with ``tables``, then ``totals`` (of deleted rows) and ``closing``.
"""

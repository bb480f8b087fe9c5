"""The audit of the locked packages."""

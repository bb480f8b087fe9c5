"""Tests of gateway/notices."""

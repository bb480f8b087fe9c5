"""Tests of the console's pages, in Chromium."""

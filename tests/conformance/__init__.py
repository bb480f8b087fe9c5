"""The guarantees of the APIs that this gateway implements, as tests: docs/compatibility.md has a row for each."""

"""The promises of the APIs that this gateway stands in for, as tests: docs/compatibility.md has a row for each."""

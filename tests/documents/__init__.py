"""The documents, followed and built: every command and file that they show is tried, and the site is made from them."""

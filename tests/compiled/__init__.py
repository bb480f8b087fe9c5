"""The compiled core: how it is derived from the sources, and the tests of the data path with it (``make compiled``)."""

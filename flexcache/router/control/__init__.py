"""The control API: what changes or shows a router's state, on a port of its own."""

"""Clients of a cache: the connections of an engine's scheduler and of its ranks."""

"""Writes traces: every call and op of a cache. `flexcache.replay` reads them."""

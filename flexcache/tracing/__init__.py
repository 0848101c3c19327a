"""Trace writer: every call and op of a cache. `flexcache.replay` reads what it writes."""

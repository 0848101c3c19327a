"""What this machine can do, and how close the cache comes: the parts of `flexcache bench`.

One module per section. Each has ``cases(thorough)``, which the suite runs in turn.
"""

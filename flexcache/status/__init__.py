"""Contents of `flexcache status`.

rates   changes between two readings of a server's counters; pure
view    a reading, and the rates, as tables that fit a width; pure
watch   reads a server repeatedly, even if it restarts
"""

"""Contents of `flexcache status`.

rates   changes between two readings of a server's counters; pure
tables  tables and lines; pure
view    a server's reading, and the rates, as tables that fit a width; pure
router  the same of a router
watch   looks at a server or a router repeatedly, even if it restarts
"""

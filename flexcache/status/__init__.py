"""Contents of `flexcache status`.

view    a server's reading, and changes since the one before, as tables that fit a width; pure
router  the same of a router
"""

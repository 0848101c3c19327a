"""What this machine can do, and how close the cache comes: the parts of `flexcache bench`.

One module per section. Each has ``cases(thorough)``, which the suite runs in turn; it is imported
when the section's turn comes, and raises `NotHere` (there or in a case) where something lacks. A
section that depends on more says so by further parameters, which the suite fills in by name:

    directory    Path         empty, on the file system to be measured; the suite removes it
    seed         int          for what is drawn at random
    remote_url   str | None   a store to be measured besides those that are always there
"""

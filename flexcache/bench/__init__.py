"""What this machine can do, and how close the cache comes: the parts of `flexcache bench`.

One module per section, named in `suite.SECTIONS`. Each has ``cases(thorough)``: making the list
costs nothing, and what lacks here is said by `NotHere`, there or in a case. A section that depends
on more than ``thorough`` says so by further parameters, which the suite fills in by name:

    directory    Path         empty, on the file system to be measured; the suite removes it
    seed         int          for what is drawn at random
    remote_url   str | None   a store to be measured besides those that are always there
"""

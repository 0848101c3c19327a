"""Sections of `flexcache bench`: what this machine can do, and how close FlexCache comes.

Each section is a module, named in `suite.SECTIONS`, with ``cases(thorough)``. Making the list must
be cheap. A case that cannot run on this machine raises `Unsupported`, and so may ``cases``. A
section declares what else it needs as further parameters, which the suite passes by name:

    directory    Path         empty, on the file system to be measured; the suite removes it
    seed         int          seed of random data
    remote_url   str | None   a store to measure besides those that are always available
"""

"""HTTP proxy between clients and engines: passes bytes on, and leaves the choice of the engine to
a `Chooser`. Needs the extra ``router``."""

"""`python -m flexcache.cli`."""

from flexcache.cli import app

app(prog_name="flexcache")

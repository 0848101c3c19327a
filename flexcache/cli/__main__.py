"""`python -m flexcache.cli`."""

from flexcache.cli.main import app

app(prog_name="flexcache")

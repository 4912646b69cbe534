"""`python -m whet`: the command line."""

from whet.cli import main

main()

"""`python -m whet.cli`: the same as `whet`."""

from whet.cli import main

main()

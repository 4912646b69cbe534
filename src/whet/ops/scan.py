"""Scan: a body over the entries of sequences. Refused so far."""

from whet.ops._refused import refused

refused("Scan", "whet has no loops; export with the loop unrolled (a fixed number of steps)")

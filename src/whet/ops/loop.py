"""Loop: repeats a body. Refused: how often is in the data, as a rule."""

from whet.ops._refused import refused

refused("Loop", "how often its body runs is known only at run time; export with the loop unrolled (a fixed number of steps)")

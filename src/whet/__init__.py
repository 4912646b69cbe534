"""whet: the fastest engine that is still right, and why."""

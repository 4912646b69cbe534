"""The memory plan: offsets in the arena for tensors, in-place pairs, views and scratch."""

"""The tactic lock: pins everything that makes an engine what it is."""

"""The tactic lock: pins every decision that determines an engine."""

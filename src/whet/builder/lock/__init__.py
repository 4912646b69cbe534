"""The tactic lock: pins every decision of a build."""

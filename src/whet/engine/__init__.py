"""The engine as data, and its file: write, read, refuse."""

from whet.engine.plan import ArenaPlan, Candidate, Choice, EnginePlan, Profile

__all__ = ["ArenaPlan", "Candidate", "Choice", "EnginePlan", "Profile"]

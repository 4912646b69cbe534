"""Families of networks. Every module registers its models."""

"""One file a family of networks; each registers its models by being here."""

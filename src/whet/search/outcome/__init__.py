"""The result of a search: folder, report data, deployment, rebuilding."""

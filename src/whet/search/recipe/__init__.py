"""The input of a search: recipe, data, metrics, targets, search space."""

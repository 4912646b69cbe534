"""The stages of one candidate: prepare, train, build, measure."""

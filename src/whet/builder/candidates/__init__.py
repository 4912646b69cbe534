"""The candidates of each layer: tactics, formats, views, reformats, and the filter of those that are timed."""

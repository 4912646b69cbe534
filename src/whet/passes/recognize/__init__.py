"""Phase RECOGNIZE: patterns become named operations."""

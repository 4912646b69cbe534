"""Phase RECOGNIZE: patterns become named ops."""
